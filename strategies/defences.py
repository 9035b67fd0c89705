"""The settings that bound what one client does to the model, and the methods that they do not protect."""

# Settings, and values of the setting ``mean``, that bound what one client's contribution does to the model.
DEFENCES = ("clip-norm", "median", "trimmed", "krum", "dp-noise-multiplier")
ALONE = "its server writes back what one client alone has trained"
# Defences that a method refuses if its clients contribute to different positions, which the server learns.
WITHOUT_MASKS = {
    "krum": "its clients cover different positions, so that whole updates cannot be compared",
    "dp-noise-multiplier": "its clients cover different positions, by masks to which no noise is added",
}
