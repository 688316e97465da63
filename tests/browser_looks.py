"""Windows in which pages are looked at: each size and each theme once, not each with each."""

LOOKS = [("desktop", "light"), ("phone", "dark")]
