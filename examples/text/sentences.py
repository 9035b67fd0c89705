"""The sentences of sentiment/*.tsv as twenty clients: five of each source, every document with one of them.

A document is the first part of ``id`` (amazon, nyt); a tweet and a sentence of a film review are one each. Every sixth
document of a source is for testing, so that no sentence of it is trained on.
"""

import pandas as pd
import torch

from fedsub_app.common.inputs import Inputs
from fedsub_app.data.text import padded, tokenizer_of

TOKENS = 16  # of a sentence; longer ones are cut
CLIENTS = 5  # of a source
TESTED = 40  # test sentences of a client


def sentences(folder, label):
    """Return (train, test); ``label``: function from a table to its labels and the rows that have one."""
    encode, _ = tokenizer_of("package:all-MiniLM-L6-v2", [], 0)
    parts = {False: [], True: []}
    for file in sorted((folder / "sentiment").glob("*.tsv")):
        rows = pd.read_csv(file, sep="\t", quoting=3, dtype={"id": str})
        document = pd.factorize(rows["id"].str.partition("_")[0])[0]
        rows = rows.assign(
            test=document % 6 == 5, client=[f"{file.stem}-{number // 6 % CLIENTS}" for number in document]
        )
        for test, part in rows[label(rows).notna()].groupby("test"):
            parts[test].append(part.groupby("client").head(TESTED) if test else part)
    split = {}
    for test, some in parts.items():
        rows = pd.concat(some)
        x = Inputs(padded(encode(rows["text"].tolist()), TOKENS), ("input_ids", "attention_mask"))
        split[test] = (x, torch.tensor(label(rows).tolist()), rows["client"].tolist())
    return split[False], split[True]


def rating(folder):
    """The mean rating of 20 readers, -4 to 4."""
    (x, y, clients), (test_x, test_y, testers) = sentences(folder, lambda rows: rows["rating"])
    return (x, y.float()[:, None], clients), (test_x, test_y.float()[:, None], testers)


def sentiment(folder):
    """Class 1 of a positive mean rating, 0 of a negative one; sentences rated 0 are left out."""
    (x, y, clients), (test_x, test_y, testers) = sentences(
        folder, lambda rows: (rows["rating"] > 0).where(rows["rating"] != 0)
    )
    return (x, y.long(), clients), (test_x, test_y.long(), testers)
