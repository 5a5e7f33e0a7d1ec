//! Documents, digests, and what names another run.

use super::*;
use crate::{run_spec::PerGroup, toy::small};

fn spec() -> RunSpec {
    small(&["run.seed=7"])
}

#[test]
fn a_document_carries_the_specification_unchanged() {
    let document = v1::RunSpecDocument::from(&spec());
    assert_eq!(RunSpec::try_from(&document).unwrap(), spec());
}

#[test]
fn a_changed_document_is_refused() {
    let mut document = v1::RunSpecDocument::from(&spec());
    document.json = document.json.replace("\"seed\":7", "\"seed\":8");
    assert!(matches!(RunSpec::try_from(&document), Err(DocumentError::Digest { .. })));
    document.json.truncate(20);
    assert!(matches!(RunSpec::try_from(&document), Err(DocumentError::Json(_))));
}

#[test]
fn a_document_that_contradicts_itself_is_refused() {
    let mut wrong = spec();
    wrong.train.micro_batch = 0;
    let error = RunSpec::try_from(&v1::RunSpecDocument::from(&wrong)).unwrap_err().to_string();
    assert!(error.contains("train.micro_batch: must be at least 1"), "{error}");
}

#[test]
fn a_run_keeps_its_digest_when_it_is_prolonged_or_cut_otherwise() {
    let mut longer = spec();
    longer.train.steps = None;
    longer.train.epochs = Some(3);
    longer.train.micro_batch = 4;
    longer.run.output_dir = "/elsewhere".into();
    longer.launch.nproc_per_node = Some(4);
    longer.memory.capacity = Some(1 << 30);
    longer.data.threads = Some(3);
    assert_eq!(digest(&longer), digest(&spec()));
    assert_eq!(differences(&longer, &spec()), vec![]);
    longer.eval.every = 5;
    let told: Vec<_> = told_changes(&spec(), &longer).iter().map(Difference::to_string).collect();
    let due = ["run.output_dir", "train.steps", "train.epochs ((absent) there, 3 here)", "eval.every"];
    assert_eq!(told.len(), due.len(), "{told:?}");
    for (told, due) in told.iter().zip(due) {
        assert!(told.starts_with(due), "{told} for {due}");
    }
    assert_eq!(told_changes(&longer, &longer), vec![]);
}

#[test]
fn every_key_whose_change_is_told_is_one_and_names_no_run() {
    for key in crate::identity::TOLD {
        let class = crate::identity::ENGINE.iter().find(|(known, _)| known == key).map(|(_, class)| class);
        assert!(matches!(class, Some(crate::identity::Class::Outside(_))), "{key}: {class:?}");
    }
}

#[test]
fn another_batch_or_seed_is_another_run_and_reported_by_key() {
    let mut other = spec();
    other.train.global_batch = 16;
    other.run.seed = 8;
    assert_ne!(digest(&other), digest(&spec()));
    let told: Vec<_> = differences(&spec(), &other).iter().map(Difference::to_string).collect();
    assert_eq!(told, ["run.seed (7 there, 8 here)", "train.global_batch (8 there, 16 here)"]);
}

#[test]
fn rates_may_change_where_a_run_goes_on_and_the_batch_may_not() {
    let mut other = spec();
    (other.optimizer.warmup_steps, other.eval.samples) = (PerGroup::All(50), 8);
    assert_ne!(digest(&other), digest(&spec()));
    assert_eq!(core_digest(&other), core_digest(&spec()));
    let changes = differences(&spec(), &other);
    assert_eq!(changes.len(), 2);
    assert!(changes.iter().all(Difference::may_change), "{changes:?}");
    other.train.global_batch = 16;
    assert_ne!(core_digest(&other), core_digest(&spec()));
    assert!(!differences(&spec(), &other).iter().all(Difference::may_change));
    assert!(may_change("optimizer.lr.network") && !may_change("optimizer.betas"));
    assert!(may_change("optimizer.clip_norm.network") && may_change("optimizer.clip_norm"));
}

/// As `spec.json` was written before run files named a task: without `task`, and without marks.
const BEFORE_TASKS: &str = r#"{"run":{"name":"a","output_dir":"runs/a","seed":7},
    "model":{"path":"m","weights_dtype":"float32","activations_dtype":"float32"},
    "lora":{"rank":16,"alpha":32.0,"rslora":false,
        "targets":"model\\.language_model\\.layers\\.\\d+\\.(self_attn\\.(q|k|v|o)_proj|mlp\\.(gate|up|down)_proj)","rank_pattern":{},"alpha_pattern":{},"init_from":null},
    "expert":{"width":384,"layers":4,"heads":6,"convention":"noise_at_zero","repeated_noise":1,
        "sampling_steps":10},
    "sensor":{"width":64,"tokens":4},
    "data":{"path":"d","cameras":["front"],"state":"observation.state","sensor":null,"action":"action",
        "horizon":16,"normalization":{"state":"mean_std","action":"mean_std","sensor":"mean_std"},
        "holdout_episodes":[],"prompt":"{task}","min_pixels":null,"max_pixels":null,"prefetch":2,
        "threads":null},
    "train":{"steps":10,"epochs":null,"global_batch":8,"micro_batch":2,"auto_micro_batch":false,
        "recompute":"none","checkpoint_every":0,"keep_checkpoints":2,"log_every":1,"resume":true},
    "optimizer":{"lr":{"lora":0.00001,"expert":0.0001,"sensor":0.0001},"betas":[0.9,0.95],"eps":1e-8,
        "weight_decay":1e-8,"clip_norm":1.0,"warmup_steps":0,"schedule":"cosine","min_lr_ratio":0.1,
        "reduce_dtype":"float32"},
    "eval":{"samples":64},
    "cache":{"mode":"off","tap":"auto","dtype":"float32","dir":null,"budget":null,"encoder_batch":null,
        "interval":{"epochs":5,"steps":null},"live":{"epochs":1,"steps":null},"rebuild_above":null,
        "rebuild_below":null,"probe_samples":32},
    "memory":{"capacity":null,"offload":"none"},
    "faults":{"mirror":true},
    "launch":{"nproc_per_node":null,"device":"auto","collectives":"auto","threads_per_worker":null,
        "listen":null}}"#;

#[test]
fn a_document_of_before_tasks_still_belongs_to_its_run() {
    // Of the specification above, before there was `model.activations_dtype`.
    const BEFORE: &str = "8259f76864f10c48110a5cf04a9c6465eec42e2a09c1e9ea17c2000dd94b2660";
    let document = v1::RunSpecDocument { json: BEFORE_TASKS.into(), digest: BEFORE.into() };
    let spec = RunSpec::try_from(&document).unwrap();
    assert_eq!(spec.task.kind, "vla_flow");
    // And what is written of it now is the same run.
    let again = v1::RunSpecDocument::from(&spec);
    assert_eq!(again.digest, BEFORE);
    assert_eq!(RunSpec::try_from(&again).unwrap(), spec);
    let older = BEFORE_TASKS.replace(
        r#""weights_dtype":"float32","activations_dtype":"float32""#,
        r#""weights_dtype":"float32""#,
    );
    assert_ne!(older, BEFORE_TASKS);
    let older = RunSpec::try_from(&v1::RunSpecDocument { json: older, digest: BEFORE.into() }).unwrap();
    assert_eq!(differences(&older, &spec), vec![]);
    let rounded =
        BEFORE_TASKS.replace(r#""activations_dtype":"float32""#, r#""activations_dtype":"bfloat16""#);
    let rounded: RunSpec = serde_json::from_str(&rounded).unwrap();
    assert_ne!(digest(&rounded), BEFORE);
    let told: Vec<_> = differences(&older, &rounded).iter().map(Difference::to_string).collect();
    assert_eq!(told, ["model.activations_dtype (\"float32\" there, \"bfloat16\" here)"]);
}

#[test]
fn the_order_of_patterns_of_before_tasks_is_part_of_what_is_learned() {
    let [one, other] = [r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#].map(|patterns| {
        let json = BEFORE_TASKS.replace(r#""rank_pattern":{}"#, &format!(r#""rank_pattern":{patterns}"#));
        serde_json::from_str::<RunSpec>(&json).unwrap()
    });
    assert_ne!(digest(&one), digest(&other));
}
