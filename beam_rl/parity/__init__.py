"""Where trainer, engine and reference stop agreeing: the same tokens through all three, sub-layer by sub-layer.

`record` holds what a side saw, `compare` judges two sides, `reference` is transformers' word, `check` runs all three and
`table` shows what came out. Importing this package costs nothing.
"""
