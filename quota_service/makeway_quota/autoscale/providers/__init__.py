"""Providers of machines: `memory` for tests and simulations."""
