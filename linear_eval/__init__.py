"""How good frozen features are: linear probes and nearest neighbours."""
