"""The script templates (`*.j2`). They loop over steps and name no flag."""
