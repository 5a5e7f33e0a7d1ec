//! Values that are no choice, and settings that contradict each other.

use super::*;

#[test]
fn names_of_choices_are_checked_and_suggested() {
    refuses(
        SMALL,
        &["train.recompute=ful"],
        "override `train.recompute=ful`: train.recompute: `ful` is not one of `none`, `selective`, `full`, `every`\n    \
         help: did you mean `full`?",
    );
    refuses(
        SMALL,
        &["train.recompute=every"],
        "override `train.recompute=every`: train.recompute: `every` needs a value; write `{every: 2}`",
    );
    refuses(
        SMALL,
        &["train.recompute={full: 2}"],
        "override `train.recompute={full: 2}`: train.recompute: `full` takes no value; write `full` alone",
    );
    refuses(
        SMALL,
        &["lora.targets={a: b}"],
        "override `lora.targets={a: b}`: lora.targets: \
         expected a list of module names, or one regular expression as text",
    );
}

#[test]
fn targets_are_a_list_or_an_expression() {
    let targets = |text: &str| small(&[&format!("lora.targets={text}")]).lora.unwrap().targets;
    assert_eq!(targets("[q_proj, v_proj]"), LoraTargets::Suffixes(vec!["q_proj".into(), "v_proj".into()]));
    assert_eq!(targets("all-linear"), LoraTargets::Regex("all-linear".into()));
}

#[test]
fn contradictions_are_reported_all_at_once_with_their_places() {
    let text =
        SMALL.replace("steps: 10", "steps: 10\n  epochs: 2").replace("micro_batch: 2", "micro_batch: 9");
    refuses(
        &text,
        &["expert.heads=5", "data.cameras=[a, a]", "optimizer.lr.lora=.nan"],
        "override `expert.heads=5`: expert.heads: 5 heads do not divide the width 384\n    \
         help: choose `expert.width` as a multiple of `expert.heads`\n\
         override `data.cameras=[a, a]`: data.cameras: names a camera twice\n    help: name each once\n\
         run.yaml:8:10: train.steps: is given together with `train.epochs`\n    \
         help: remove one of them (on the command line: `train.epochs=`)\n\
         run.yaml:11:16: train.micro_batch: 9 is larger than the global batch of 8\n    \
         help: lower `train.micro_batch` or raise `train.global_batch`\n\
         override `optimizer.lr.lora=.nan`: optimizer.lr.lora: must be a finite number of at least 0, is NaN\n    \
         help: correct it",
    );
}

#[test]
fn every_rule_has_a_case() {
    for (given, field) in [
        ("run.name=a/b", "run.name"),
        ("run.name=''", "run.name"),
        ("run.output_dir=''", "run.output_dir"),
        ("model.path=''", "model.path"),
        ("lora.rank=0", "lora.rank"),
        ("lora.alpha=0", "lora.alpha"),
        ("lora.targets=[]", "lora.targets"),
        ("lora.targets='(a'", "lora.targets"),
        ("lora.rank_pattern={a: 0}", "lora.rank_pattern"),
        ("lora.alpha_pattern={a: -1}", "lora.alpha_pattern"),
        ("lora.init_from=''", "lora.init_from"),
        ("optimizer.lr.expert=0", "optimizer.lr.expert"),
        ("expert.layers=0", "expert.layers"),
        ("expert.heads=0", "expert.heads"),
        ("expert.repeated_noise=0", "expert.repeated_noise"),
        ("expert.sampling_steps=0", "expert.sampling_steps"),
        ("sensor.tokens=0", "sensor.tokens"),
        ("data.path=''", "data.path"),
        ("data.cameras=[]", "data.cameras"),
        ("data.sensor=''", "data.sensor"),
        ("data.horizon=0", "data.horizon"),
        ("data.holdout_episodes=[1, 1]", "data.holdout_episodes"),
        ("data.prompt=''", "data.prompt"),
        ("data.threads=0", "data.threads"),
        ("data.min_pixels=0", "data.min_pixels"),
        ("train.steps=", "train"),
        ("train.steps=0", "train.steps"),
        ("train.global_batch=0", "train.global_batch"),
        ("train.micro_batch=0", "train.micro_batch"),
        ("train.recompute={every: 0}", "train.recompute.every"),
        ("train.keep_checkpoints=0", "train.keep_checkpoints"),
        ("train.log_every=0", "train.log_every"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("optimizer.eps=0", "optimizer.eps"),
        ("optimizer.clip_norm=-1", "optimizer.clip_norm"),
        ("optimizer.weight_decay=.inf", "optimizer.weight_decay"),
        ("optimizer.min_lr_ratio=2", "optimizer.min_lr_ratio"),
        ("memory.capacity=0", "memory.capacity"),
        ("memory.offload=disk", "memory.offload"),
        ("launch.nproc_per_node=0", "launch.nproc_per_node"),
        ("launch.threads_per_worker=0", "launch.threads_per_worker"),
        ("launch.listen=nowhere", "launch.listen"),
        ("launch={device: cpu, collectives: nccl}", "launch.collectives"),
    ] {
        let error = read(SMALL, &[given]).expect_err(given);
        assert!(error.problems().iter().any(|p| p.path == field), "{given}: {error}");
    }
}

#[test]
fn layers_are_streamed_only_where_the_tape_does_not_keep_them() {
    let layers = "memory.offload=layers";
    for kept in ["train.recompute=none", "train.recompute={every: 2}"] {
        let error = read(SMALL, &["lora={}", kept, layers]).expect_err(kept);
        let [problem] = error.problems() else { panic!("{error}") };
        assert_eq!(problem.path, "memory.offload");
        assert!(error.to_string().contains("train.recompute: full"), "{error}");
        // Without adapters nothing of the model is on a tape.
        assert_eq!(small(&[kept, layers]).memory.offload, Offload::Layers);
    }
    for again in ["train.recompute=full", "train.recompute=selective", "train.recompute={every: 1}"] {
        assert_eq!(small(&["lora={}", again, layers]).memory.offload, Offload::Layers);
    }
}

#[test]
fn asking_for_what_every_run_does_is_no_error_and_where_weights_lie_is_not_what_is_learned() {
    assert_eq!(small(&["memory.offload=optimizer"]).memory.offload, Offload::Optimizer);
    let digest = |given: &[&str]| crate::document::digest(&small(given));
    assert_eq!(digest(&[]), digest(&["memory.offload=layers"]));
}

#[test]
fn a_world_needs_a_sample_for_every_worker() {
    let spec = small(&[]);
    spec.check_world(8).unwrap();
    let error = spec.check_world(9).unwrap_err().to_string();
    assert!(error.starts_with("train.global_batch: 8 samples cannot be shared by 9 workers"), "{error}");
    spec.check_world(0).unwrap_err();
}
