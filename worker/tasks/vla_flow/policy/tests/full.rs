//! Modules of the pretrained model that train in full (`model.train`).

use super::*;
use crate::vla_flow::config::VlaSpec;
use coxswain_models::families::shelf;

/// Something of every kind: patch embedding, norms, linears with and without a bias, the merger, the token
/// embedding, a whole decoder layer, the final norm.
const OF_EVERY_KIND: [&str; 8] = [
    r"patch_embed\.proj",
    r"visual\.blocks\.1\.(norm1|attn\.qkv)",
    r"visual\.blocks\.2\.mlp",
    r"visual\.merger",
    "embed_tokens",
    r"layers\.2\.(self_attn\.[qk]_proj|mlp\.down_proj|input_layernorm)",
    r"layers\.4",
    r"language_model\.norm",
];
/// Adapters beside them.
const BESIDE: &str = r".*(layers\.3\..*(q_proj|down_proj)|blocks\.3\.attn\.qkv)";

fn training(train: &[&str], changes: &[(&str, Value)]) -> RunSpec {
    let model = ("model", json!({"path": MODEL, "train": train}));
    let lora = ("lora", json!({"rank": 2, "targets": BESIDE}));
    spec(&[&[model, lora][..], changes].concat())
}

fn recompute(mode: Value) -> (&'static str, Value) {
    ("train", json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode}))
}

fn refused(spec: &RunSpec) -> String {
    let loaded = Policy::<Flex>::load(spec, shelf(), DIMS, &Default::default());
    loaded.err().expect("it cannot be").to_string()
}

#[test]
fn recompute_changes_no_bit_of_what_trains_in_full() {
    let top = [r"layers\.5", r"language_model\.norm"];
    for train in [&OF_EVERY_KIND[..], &top, &[r"language_model\.norm"], &[r"merger\.ln_q"], &["embed_tokens"]]
    {
        for activations in ["float32", "bfloat16"] {
            let of = |mode: Value| {
                let mut spec = training(train, &[recompute(mode)]);
                spec.vla_mut().model.activations_dtype =
                    serde_json::from_value(json!(activations)).expect("a precision");
                shaken(&spec)
            };
            let kept = of(json!("none"));
            let (loss, grads) = kept.run(&batch(&[0, 1, 2]));
            let layout = kept.trainables.layout();
            assert!(layout.params().iter().all(|param| grads.touched(param)), "{train:?}");
            for mode in [json!("selective"), json!("full"), json!({"every": 2})] {
                let again = of(mode.clone()).run(&batch(&[0, 1, 2]));
                assert!(again == (loss, grads.clone()), "{mode} {train:?} {activations}");
            }
        }
    }
}

#[test]
fn gradients_of_what_trains_in_full_are_derivatives() {
    are_derivatives(&shaken(&training(&OF_EVERY_KIND, &[])));
    let alone = shaken(&training(&[r"visual", r"language_model\.layers"], &[("lora", Value::Null)]));
    assert!(alone.trainables.layout().params().iter().all(|param| param.group != Group::LORA));
    are_derivatives(&alone);
}

#[test]
fn splitting_a_batch_changes_gradients_of_whole_modules_by_rounding_only() {
    split(&shaken(&training(&OF_EVERY_KIND, &[])));
}

#[test]
fn a_run_begins_with_the_checkpoints_values() {
    // The file is bfloat16 and frozen weights are kept as float32, so frozen and trained ones are the same
    // numbers. Draws depend on a tensor's place in the layout: those of the other groups are taken over.
    let (frozen, trained) = (load(&training(&[], &[])), load(&training(&OF_EVERY_KIND, &[])));
    let mut values = trained.trainables.to_vec();
    let drawn = frozen.trainables.to_vec();
    for param in frozen.trainables.layout().params() {
        let layout = trained.trainables.layout();
        let ours = layout.get(layout.find(&param.name).expect("what trains without it trains beside it"));
        values[ours.range()].copy_from_slice(&drawn[param.range()]);
    }
    let layout = trained.trainables.layout().clone();
    let taken_over = Trainables::new(layout, values, &Default::default());
    let loss = |fixture: &Fixture, trainables| fixture.policy.loss(trainables, &batch(&[0, 1, 2]));
    assert_eq!(loss(&trained, &taken_over), loss(&frozen, &frozen.trainables));
    let checkpoint =
        Checkpoint::open(std::path::Path::new(MODEL), load(&spec(&[])).policy.model().outline().rules)
            .expect("part of the repository");
    let values = trained.trainables.to_vec();
    for param in trained.trainables.layout().params().iter().filter(|param| param.group == Group::BASE) {
        let stored = checkpoint
            .matrix(&param.name, &param.shape, &[param.len()], Default::default())
            .expect("it has the checkpoint's name and shape");
        assert_eq!(stored.as_slice::<f32>().expect("float32"), &values[param.range()], "{}", param.name);
    }
}

#[test]
fn streamed_blocks_and_those_that_are_held_train_alike() {
    for train in [&OF_EVERY_KIND[..], &[r"visual", r"layers"]] {
        for dtype in ["float32", "bfloat16"] {
            let of = |offload: &str| {
                let lora = if train.len() == 2 { ("lora", Value::Null) } else { ("cache", json!({})) };
                let memory = ("memory", json!({"offload": offload}));
                let model = ("model", json!({"path": MODEL, "train": train, "weights_dtype": dtype}));
                shaken(&training(train, &[recompute(json!("full")), lora, memory, model]))
            };
            let (held, streamed) = (of("none"), of("layers"));
            assert!(held.run(&batch(&[0, 1, 2])) == streamed.run(&batch(&[0, 1, 2])), "{dtype} {train:?}");
        }
    }
}

#[test]
fn features_are_kept_below_what_trains_and_nowhere_above() {
    let exact = |tap: Value| ("cache", json!({"mode": "exact", "tap": tap}));
    let top = [r"layers\.[45]", r"language_model\.norm"];
    let upper = ("lora", json!({"rank": 2, "targets": r".*layers\.3\..*q_proj"}));
    let fixture = shaken(&training(&top, &[exact(json!("auto")), upper.clone()]));
    assert_eq!(fixture.policy.tap(), Some(Tap::Layer(3)));
    let batch = batch(&[0, 1, 2]);
    let kept = fixture.policy.features_below(&fixture.trainables, &batch).expect("a sound batch");
    let cached = MicroBatch { pixel_values: vec![], features: Some(kept), ..batch.clone() };
    assert!(fixture.run(&cached) == fixture.run(&batch), "kept features change nothing");
    let frozen = ("lora", Value::Null);
    let message = refused(&training(&top, &[exact(json!("final")), frozen.clone()]));
    assert!(
        message.starts_with("cache.tap: ") && message.contains("decoder layer 4 comes before it and trains"),
        "{message}"
    );
    let message = refused(&training(&[r"merger"], &[exact(json!("auto")), frozen.clone()]));
    assert!(message.contains("`model.visual.merger.ln_q` trains"), "{message}");
    // The final norm alone: of the features below it the last layer's input is the deepest that has a name.
    let norm = shaken(&training(&[r"language_model\.norm"], &[exact(json!("auto")), frozen]));
    assert_eq!(norm.policy.tap(), Some(Tap::Layer(5)));
}

#[test]
fn image_features_are_kept_below_an_embedding_that_trains() {
    let frozen = ("lora", Value::Null);
    let cache = ("cache", json!({"mode": "exact"}));
    let fixture = shaken(&training(&["embed_tokens"], &[cache, frozen.clone()]));
    assert_eq!(fixture.policy.tap(), Some(Tap::Vision));
    let batch = batch(&[0, 1, 2]);
    let kept = fixture.policy.features_below(&fixture.trainables, &batch).expect("a sound batch");
    let cached = MicroBatch { pixel_values: vec![], features: Some(kept), ..batch.clone() };
    assert!(fixture.run(&cached) == fixture.run(&batch), "kept features change nothing");
    let last = ("cache", json!({"mode": "exact", "tap": "final"}));
    let message = refused(&training(&["embed_tokens"], &[last, frozen.clone()]));
    assert!(message.contains("the token embedding comes before it and trains"), "{message}");
    // Tokens that no sample has keep their rows: nothing reads this table but the lookup.
    let (_, grads) = fixture.run(&batch);
    let (layout, table) = (fixture.trainables.layout(), "model.language_model.embed_tokens.weight");
    let table = layout.get(layout.find(table).expect("it trains"));
    let sums = grads.values()[table.range()].chunks(table.shape[1]);
    let reached = sums.enumerate().filter(|(_, row)| row.iter().any(|gradient| *gradient != 0.0));
    let reached: Vec<u32> = reached.map(|(row, _)| row as u32).collect();
    let image = fixture.policy.model().outline().tokens.image;
    assert!(!reached.is_empty() && reached.iter().all(|row| batch.input_ids.contains(row) && *row != image));
    // No action asks for logits. In this model the head is the table; in another it would be refused.
    let [by_head, by_name] =
        ["lm_head", "embed_tokens"].map(|name| load(&training(&[name], std::slice::from_ref(&frozen))));
    assert_eq!(by_head.trainables.layout(), by_name.trainables.layout());
}

#[test]
fn an_adapter_and_full_training_of_one_module_are_refused_by_name() {
    let message = refused(&training(&[r"layers\.3"], &[]));
    assert!(message.contains("model.train") && message.contains("layers.3.self_attn.q_proj"), "{message}");
    let message = refused(&training(&["nowhere"], &[]));
    assert!(message.contains("`nowhere` matches no module"), "{message}");
}

#[test]
fn what_trains_in_full_goes_out_to_peft_and_comes_back() {
    let train = [r"visual\.merger", r"layers\.2\.input_layernorm", r"patch_embed\.proj"];
    let donor = shaken(&training(&train, &[]));
    let (dir, layout) = (tempfile::tempdir().expect("a directory"), donor.trainables.layout());
    let values = donor.trainables.to_vec();
    let origin = coxswain_nn::lora::AdapterOrigin {
        base_model: "base",
        task_type: None,
        readme: "",
        tied: None,
        trained_above: None,
    };
    let plan = donor.policy.lora().expect("it has adapters");
    coxswain_nn::lora::write_adapter(dir.path(), plan, layout, &values, &origin).expect("it is ours");
    let config = std::fs::read_to_string(dir.path().join("adapter_config.json")).expect("written");
    let config: Value = serde_json::from_str(&config).expect("valid");
    let whole = [
        "model.language_model.layers.2.input_layernorm",
        "model.visual.merger.ln_q",
        "model.visual.merger.mlp.0",
        "model.visual.merger.mlp.2",
        "model.visual.patch_embed.proj",
    ];
    assert_eq!(config["modules_to_save"], json!(whole));
    let lora = json!({"rank": 2, "targets": BESIDE, "init_from": dir.path()});
    let again = load(&training(&train, &[("lora", lora.clone())]));
    let of_model = |fixture: &Fixture| {
        let layout = fixture.trainables.layout();
        let kept = layout.params().iter().filter(|param| [Group::LORA, Group::BASE].contains(&param.group));
        let values = fixture.trainables.to_vec();
        kept.flat_map(|param| values[param.range()].to_vec()).collect::<Vec<_>>()
    };
    assert_eq!(of_model(&again), of_model(&donor));
    let fewer = |lora| training(&[r"visual\.merger"], &[("lora", lora)]);
    let message = refused(&fewer(lora));
    assert!(message.contains("input_layernorm") && message.contains("add it to model.train"), "{message}");
    // The other door, `train.init_from`.
    let task: &dyn coxswain_task::Task = &crate::vla_flow::VlaFlow::<Flex>::default();
    let taken = task.read_weights(&training(&train, &[]), dir.path()).expect("the same modules");
    assert_eq!(taken.iter().filter(|tensor| task.group_of(&tensor.name) == Some(Group::BASE)).count(), 7);
    let plain = json!({"rank": 2, "targets": BESIDE});
    let message = task.read_weights(&fewer(plain), dir.path()).expect_err("fewer modules").to_string();
    assert!(message.contains("input_layernorm") && message.contains("add it to model.train"), "{message}");
    // What is both adapted and saved has no meaning that a run or a pass could give it.
    let mut both = config;
    both["modules_to_save"] = json!(["layers.3"]);
    std::fs::write(dir.path().join("adapter_config.json"), both.to_string()).expect("written");
    let message = task.read_weights(&training(&train, &[]), dir.path()).expect_err("both").to_string();
    assert!(message.contains("layers.3.") && message.contains("is both adapted and in"), "{message}");
}
