"""What is read off finished runs: records, comparisons, pictures, pages."""
