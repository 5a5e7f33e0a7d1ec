//! Adapters whose magnitudes train apart (`lora.use_dora`). Their gradients, whose norms are constants, are
//! held against PEFT's by the golden cases.

use coxswain_models::families::shelf;
use std::path::Path;

use coxswain_task::Task;

use super::*;
use crate::vla_flow::{VlaFlow, config::VlaSpec};

fn lora(dora: bool, dropout: f64) -> (&'static str, Value) {
    ("lora", json!({"rank": 2, "alpha": 4.0, "targets": EVERYWHERE, "dropout": dropout, "use_dora": dora}))
}

fn recompute(mode: Value) -> (&'static str, Value) {
    ("train", json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode}))
}

#[test]
fn recompute_and_streaming_change_no_bit_under_dora() {
    for (dropout, activations) in [(0.0, "float32"), (0.3, "float32"), (0.0, "bfloat16")] {
        let of = |mode: Value, offload: &str| {
            let memory = ("memory", json!({"offload": offload}));
            let mut spec = spec(&[lora(true, dropout), recompute(mode), memory]);
            spec.vla_mut().model.activations_dtype =
                serde_json::from_value(json!(activations)).expect("known");
            shaken(&spec)
        };
        let kept = of(json!("none"), "none");
        let (loss, grads) = kept.run(&batch(&[0, 1, 2]));
        assert!(kept.trainables.layout().params().iter().all(|param| grads.touched(param)));
        for (mode, offload) in [
            (json!("selective"), "none"),
            (json!("full"), "none"),
            (json!({"every": 2}), "none"),
            (json!("full"), "layers"),
        ] {
            let again = of(mode.clone(), offload).run(&batch(&[0, 1, 2]));
            assert!(again == (loss, grads.clone()), "{mode} {offload} {dropout} {activations}");
        }
    }
}

#[test]
fn a_new_adapter_with_magnitudes_leaves_the_model_as_it_was() {
    // Where inputs are rounded for a product, a difference in the last bit becomes one of bfloat16's.
    coxswain_nn::kernels::precision::allow_bfloat16_matmul(false);
    for dtype in ["float32", "bfloat16", "nf4", "int8"] {
        let model = ("model", json!({"path": MODEL, "weights_dtype": dtype}));
        let hidden = |lora: (&'static str, Value)| {
            let fixture = load(&spec(&[lora, model.clone()]));
            let features = fixture.policy.vl_features(&fixture.trainables, &batch(&[0, 1])).expect("sound");
            download(features.hidden_nd)
        };
        assert!(relative_error(&hidden(lora(true, 0.0)), &hidden(("lora", Value::Null))) < 1e-5, "{dtype}");
    }
}

#[test]
fn dropout_leaves_what_magnitudes_are_of_alone_outside_training() {
    let (plain, dropping) = (shaken(&spec(&[lora(true, 0.0)])), shaken(&spec(&[lora(true, 0.3)])));
    let loss = |fixture: &Fixture| fixture.policy.loss(&fixture.trainables, &batch(&[0, 1])).expect("sound");
    assert_eq!(loss(&plain), loss(&dropping));
    assert_ne!(dropping.run(&batch(&[0, 1])).0, loss(&dropping));
}

#[test]
fn magnitudes_go_out_to_peft_and_come_back() {
    let donor = shaken(&spec(&[lora(true, 0.0)]));
    let (dir, layout) = (tempfile::tempdir().expect("a directory"), donor.trainables.layout());
    let origin = coxswain_nn::lora::AdapterOrigin {
        base_model: "base",
        task_type: None,
        readme: "",
        tied: None,
        trained_above: None,
    };
    let plan = donor.policy.lora().expect("it has adapters");
    let values = donor.trainables.to_vec();
    coxswain_nn::lora::write_adapter(dir.path(), plan, layout, &values, &origin).expect("it is ours");
    let from = |dora: bool| {
        let (_, mut lora) = lora(dora, 0.0);
        lora["init_from"] = json!(dir.path());
        spec(&[("lora", lora)])
    };
    // Where a run starts from it (`train.init_from`), the same: A and B without their magnitudes, or beside
    // drawn ones, would be another function.
    let task: &dyn Task = &VlaFlow::<Flex>::default();
    let taken = task.read_weights(&spec(&[lora(true, 0.0)]), dir.path()).expect("the same adapter");
    assert_eq!(taken.len(), layout.params().iter().filter(|param| param.group == Group::LORA).count());
    let other =
        |dora: bool, dir: &Path| task.read_weights(&spec(&[lora(dora, 0.0)]), dir).expect_err("other");
    let message = other(false, dir.path()).to_string();
    assert!(message.contains(", DoRA) in the adapter") && message.contains("lora.use_dora"), "{message}");
    let (plain, its_dir) =
        (shaken(&spec(&[lora(false, 0.0)])), tempfile::tempdir().expect("another directory"));
    let (plan, layout) = (plain.policy.lora().expect("it has adapters"), plain.trainables.layout());
    coxswain_nn::lora::write_adapter(its_dir.path(), plan, layout, &plain.trainables.to_vec(), &origin)
        .expect("it is ours");
    let message = other(true, its_dir.path()).to_string();
    assert!(message.contains(", DoRA) in this run"), "{message}");

    let again = load(&from(true));
    let of_adapters = |fixture: &Fixture| {
        let values = fixture.trainables.to_vec();
        let params = fixture.trainables.layout().params().iter().filter(|param| param.group == Group::LORA);
        params.flat_map(|param| values[param.range()].to_vec()).collect::<Vec<_>>()
    };
    assert_eq!(of_adapters(&again), of_adapters(&donor));
    let refused = Policy::<Flex>::load(&from(false), shelf(), DIMS, &Default::default())
        .err()
        .expect("another adapter");
    assert!(refused.to_string().contains("DoRA"), "{refused}");
}
