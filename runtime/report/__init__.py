"""The page of a run, as one file or live: read from what the run leaves behind, without torch.

    run_files     the folder of a run -> RunFiles          metrics_log    metrics.jsonl, also while it is written
    charts        its numbers -> Chart                     plotting       Chart -> paths and ticks of an SVG
    verdict       what is known of how good it is          cautions       what speaks for care
    dataset       contact sheet, buckets, cache            tables         settings, provenance, evaluation
    page          all of it -> blocks of HTML              media          pictures in the page, beside it, or served
    make          `wangen report`                          live, server   `wangen watch`
"""
