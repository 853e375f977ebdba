"""Several Edge TPUs: a model split over them, and models that share them."""
