//! Keys that are unknown, misplaced or missing.

use super::*;

#[test]
fn an_unknown_key_is_named_with_its_place_and_a_suggestion() {
    refuses(
        &SMALL.replace("  micro_batch: 2", "  micro_batch: 2\n  recomptue: full"),
        &[],
        "run.yaml:11:3: train.recomptue: unknown key\n    help: did you mean `train.recompute`?",
    );
}

#[test]
fn a_key_of_another_section_is_suggested_there() {
    refuses(
        &format!("{SMALL}lr: 1e-4\n"),
        &[],
        "run.yaml:11:1: lr: unknown key\n    help: did you mean `optimizer.lr.head`?",
    );
}

#[test]
fn without_a_near_miss_the_keys_of_the_section_are_listed() {
    refuses(
        &SMALL.replace("{width: 8}", "{width: 8, xyzzy: 1}"),
        &[],
        "run.yaml:3:18: head.xyzzy: unknown key\n    help: keys of `head` are `width`, `bias`, `frozen`",
    );
    // Of a section that engine and task share, the engine's first.
    refuses(
        &SMALL.replace("columns: [x]", "columns: [x]\n  xyzzy: 1"),
        &[],
        "run.yaml:7:3: data.xyzzy: unknown key\n    help: keys of `data` are `path`, `holdout_episodes`, `prefetch`, \
         `threads`, `bucket_cache`, `columns`, `weight`",
    );
}

#[test]
fn keys_of_other_trainers_are_known() {
    let suggests = |given: &str, ours: &str| {
        refuses(
            SMALL,
            &[given],
            &format!(
                "override `{given}`: {}: unknown key\n    help: did you mean `{ours}`?",
                given.split('=').next().unwrap_or_default()
            ),
        );
    };
    suggests("learning_rate=1e-4", "optimizer.lr");
    suggests("optimizer.learning_rate=1e-4", "optimizer.lr");
    suggests("train.per_device_train_batch_size=2", "train.micro_batch");
    suggests("max_steps=2", "train.steps");
}

#[test]
fn all_unknown_keys_are_reported_together_with_what_is_missing() {
    refuses(
        &SMALL
            .replace("width: 8", "wdth: 8")
            .replace("steps: 10", "step: 10")
            .replace("[x]", "[x]\n  pth: e"),
        &[],
        "run.yaml:7:3: data.pth: unknown key\n    help: did you mean `data.path`?\n\
         run.yaml:9:3: train.step: unknown key\n    help: did you mean `train.steps`?\n\
         run.yaml:3:8: head.wdth: unknown key\n    help: did you mean `head.width`?\n\
         run.yaml:3:7: head.width: this key is required and missing",
    );
}
