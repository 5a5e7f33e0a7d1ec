//! Values that are no choice, and settings that contradict each other.

use super::*;

#[test]
fn names_of_choices_are_checked_and_suggested() {
    refuses(
        SMALL,
        &["train.recompute=ful"],
        "override `train.recompute=ful`: train.recompute: `ful` is not one of `none`, `selective`, `full`, `every`, `auto`\n    \
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
}

#[test]
fn what_people_write_for_short_is_answered_with_the_right_spelling() {
    refuses(
        SMALL,
        &["optimizer.reduce_dtype=bf16"],
        "override `optimizer.reduce_dtype=bf16`: optimizer.reduce_dtype: `bf16` is not one of `float32`, `bfloat16`\n    \
         help: did you mean `bfloat16`?",
    );
    refuses(
        SMALL,
        &["optimizer.lr=1e-4"],
        "override `optimizer.lr=1e-4`: optimizer.lr: expected a map of keys, found `1e-4`\n    \
         help: its keys are `head`; as an override: `optimizer.lr.head=1e-4`",
    );
}

#[test]
fn contradictions_are_reported_all_at_once_with_their_places() {
    let text =
        SMALL.replace("steps: 10", "steps: 10\n  epochs: 2").replace("micro_batch: 2", "micro_batch: 9");
    refuses(
        &text,
        &["head.width=0", "optimizer.lr.head=.nan", "memory.offload=layers"],
        "run.yaml:8:10: train.steps: is given together with `train.epochs`\n    \
         help: remove one of them (on the command line: `train.epochs=`)\n\
         run.yaml:11:16: train.micro_batch: 9 is larger than the global batch of 8\n    \
         help: lower `train.micro_batch` or raise `train.global_batch`\n\
         override `head.width=0`: head.width: must be at least 1, is 0\n    help: give a positive whole number\n\
         override `optimizer.lr.head=.nan`: optimizer.lr.head: must be a finite number of at least 0, is NaN\n    \
         help: write a number in that range\n\
         override `memory.offload=layers`: memory.offload: is `layers`, but nothing is frozen\n    help: remove it",
    );
}

#[test]
fn every_rule_has_a_case() {
    for (given, field) in [
        ("run.name=a/b", "run.name"),
        ("run.name=''", "run.name"),
        ("run.output_dir=''", "run.output_dir"),
        ("data.path=''", "data.path"),
        ("data.holdout_episodes=[1, 1]", "data.holdout_episodes"),
        ("data.threads=0", "data.threads"),
        ("train.steps=", "train"),
        ("train.steps=0", "train.steps"),
        ("train.global_batch=0", "train.global_batch"),
        ("train.micro_batch=0", "train.micro_batch"),
        ("train.recompute={every: 0}", "train.recompute.every"),
        ("train.keep_checkpoints=0", "train.keep_checkpoints"),
        ("train.log_every=0", "train.log_every"),
        ("optimizer.name=sgd", "optimizer.name"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("optimizer.eps=0", "optimizer.eps"),
        ("optimizer.clip_norm=-1", "optimizer.clip_norm"),
        ("optimizer.weight_decay=.inf", "optimizer.weight_decay"),
        ("optimizer.ema_decay=1", "optimizer.ema_decay"),
        ("optimizer.ema_power=0.75", "optimizer.ema_power"),
        ("optimizer.loss_scale={initial: 1000}", "optimizer.loss_scale.initial"),
        ("optimizer.loss_scale={initial: 0.5}", "optimizer.loss_scale.initial"),
        ("optimizer.loss_scale={initial: .inf}", "optimizer.loss_scale.initial"),
        ("optimizer.loss_scale={growth_interval: 0}", "optimizer.loss_scale.growth_interval"),
        ("optimizer.min_lr_ratio=2", "optimizer.min_lr_ratio"),
        ("optimizer.schedule=staircase", "optimizer.schedule"),
        ("optimizer.schedule_over=live", "optimizer.schedule_over"),
        ("optimizer.warmup_ratio=1.5", "optimizer.warmup_ratio"),
        ("optimizer={warmup_ratio: 0.1, warmup_steps: 5}", "optimizer.warmup_ratio"),
        ("optimizer={decay_steps: 5, warmup_steps: 5}", "optimizer.decay_steps"),
        ("optimizer.warmup_steps={nobody: 5}", "optimizer.warmup_steps"),
        ("optimizer.clip_norm={nobody: 1}", "optimizer.clip_norm"),
        ("memory.capacity=0", "memory.capacity"),
        ("memory.offload=disk", "memory.offload"),
        ("memory.offload=embedding", "memory.offload"),
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
fn asking_for_what_every_run_does_is_no_error() {
    assert_eq!(small(&["memory.offload=optimizer"]).memory.offload, Offload::Optimizer);
}

#[test]
fn a_world_needs_a_sample_for_every_worker() {
    let spec = small(&[]);
    spec.check_world(8).unwrap();
    let error = spec.check_world(9).unwrap_err().to_string();
    assert!(error.starts_with("train.global_batch: a batch of 8 cannot be shared by 9 workers"), "{error}");
    spec.check_world(0).unwrap_err();
}

#[test]
fn every_number_has_bounds_and_one_beyond_them_is_refused_at_its_place() {
    assert_eq!(crate::config::engine_misfits(), Vec::<String>::new());
    let of = |key: &str, value: &str| {
        let given = format!("{key}={value}");
        read(SMALL, &[&given]).expect_err(&given).to_string()
    };
    let told = of("head.width", "18446744073709551615");
    assert!(
        told.starts_with("override `head.width=18446744073709551615`: head.width: must be at most 65536"),
        "{told}"
    );
    for (key, least, most) in crate::config::bounds::ENGINE {
        // Every number is as good as any other, or the type has no larger one.
        if *most >= u64::MAX as f64 || *least < 0.0 {
            continue;
        }
        // Rules refuse what the type alone refuses, too, in their own words.
        let beyond = match *most < 10.0 {
            true => format!("{}", most + 1.5),
            false => format!("{}", *most as u64 * 2),
        };
        let value = match *key {
            "train.recompute" => format!("{{every: {beyond}}}"),
            "optimizer.betas" => format!("[{beyond}, 0.9]"),
            "data.holdout_episodes" | "train.skip_steps" => format!("[{beyond}]"),
            _ => beyond,
        };
        let told = of(key, &value);
        assert!(told.contains(key), "{key}={value}: {told}");
    }
}
