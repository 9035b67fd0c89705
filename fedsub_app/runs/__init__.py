"""Run directories and what is read off them: reports, pictures, analyses."""
