"""Providers of machines: `memory` for tests and simulations, `local` with processes of this machine."""
