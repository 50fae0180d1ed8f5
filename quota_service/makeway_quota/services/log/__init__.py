"""Show what was decided and what happened, what is removed when, and how full storage becomes."""
