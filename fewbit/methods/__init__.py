"""How layers hold and run quantized weights: `QuantizeMethodBase` and its children."""
