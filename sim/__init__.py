"""How long it would take: hardware, cost, two engines, bounds. Never imports torch."""
