"""Pictures of the front page and of ``docs``, drawn from the results in ``docs/figures``."""
