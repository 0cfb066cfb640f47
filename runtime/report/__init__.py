"""The page of a run, as one file or live: read from what the run leaves behind, without torch.

`run_files` reads the folder of a run (`metrics_log` what may still be written), `charts` and `plotting` draw its
numbers, `verdict` and `cautions` judge, `dataset` looks at what it was trained on, `tables` makes tables of the rest.
`page` makes HTML of all that, with `media` for pictures: `make` writes it (`wangen report`), `live` serves it
(`wangen watch`).
"""
