"""Graph and Machine -> Costs: measured on a GPU, or counted without one (roofline.py). Nothing here imports torch until it is asked to measure."""
