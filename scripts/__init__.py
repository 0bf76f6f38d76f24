"""Measurements and checks that are no part of the installed package; `python -m scripts` lists
them."""
