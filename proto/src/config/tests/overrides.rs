//! `KEY=VALUE` on the command line, and the patterns that only mappings can say.

use super::*;

#[test]
fn overrides_set_add_and_take_back() {
    let spec = small(&[
        "optimizer.lr.head=1e-4",
        "train.recompute=full",
        "data.columns=[x, y]",
        "data.weight=w",
        "data.weight=",
        "head.frozen={'a\\.b': 4}",
        "run.name=007",
    ]);
    let toy = settings(&spec);
    assert_eq!(toy.optimizer.lr.head, 1e-4);
    assert_eq!(spec.train.recompute, Recompute::Full);
    assert_eq!(toy.data.columns, ["x", "y"]);
    assert_eq!(toy.data.weight, None);
    assert_eq!(toy.head.frozen["a\\.b"], 4);
    assert_eq!(spec.run.name, "007");
}

#[test]
fn an_override_reaches_into_a_scalar_and_the_later_one_wins() {
    assert_eq!(
        small(&["train.recompute=full", "train.recompute.every=2"]).train.recompute,
        Recompute::Every(2)
    );
    assert_eq!(
        small(&["train.recompute={every: 2}", "train.recompute=none"]).train.recompute,
        Recompute::None
    );
}

#[test]
fn a_wrong_override_is_named() {
    refuses(
        SMALL,
        &["train.steps=ten"],
        "override `train.steps=ten`: train.steps: expected a whole number of at least 0, found `ten`",
    );
    refuses(
        SMALL,
        &["optimizer.lr.haed=1"],
        "override `optimizer.lr.haed=1`: optimizer.lr.haed: unknown key\n    help: did you mean `optimizer.lr.head`?",
    );
    refuses(
        SMALL,
        &["data.columns.0=y"],
        "override `data.columns.0=y`: data.columns: is a list and cannot be changed in part\n    \
         help: replace it as a whole: `data.columns=[first, second]`",
    );
    refuses(
        SMALL,
        &["train.steps"],
        "override `train.steps`: there is no `=` in it\n    \
         help: write `section.key=value`, for instance `train.steps=100`",
    );
    refuses(
        SMALL,
        &["train..steps=1"],
        "override `train..steps=1`: a part of the key is empty\n    \
         help: write `section.key=value`, for instance `train.steps=100`",
    );
    refuses(
        SMALL,
        &["train.micro_batch=9"],
        "override `train.micro_batch=9`: train.micro_batch: 9 is larger than the global batch of 8\n    \
         help: lower `train.micro_batch` or raise `train.global_batch`",
    );
}
