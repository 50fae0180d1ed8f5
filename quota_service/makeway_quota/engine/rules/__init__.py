"""Rules of the engine: order, holds, fair share, victims, moves, forecasts; docs/explanation/engine.md lists all."""
