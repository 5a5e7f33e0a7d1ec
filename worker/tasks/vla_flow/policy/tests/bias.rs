//! Biases that train beside adapters (`lora.bias`). Their gradients are held against PEFT's by the golden
//! cases.

use super::*;
use crate::vla_flow::config::VlaSpec;
use coxswain_models::families::shelf;

fn lora(bias: &str, dora: bool) -> (&'static str, Value) {
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": EVERYWHERE, "bias": bias, "use_dora": dora});
    ("lora", lora)
}

fn recompute(mode: Value) -> (&'static str, Value) {
    ("train", json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode}))
}

fn biases(fixture: &Fixture) -> Vec<String> {
    let params = fixture.trainables.layout().params().iter().filter(|param| param.name.ends_with(".bias"));
    params.filter(|param| param.group == Group::LORA).map(|param| param.name.clone()).collect()
}

#[test]
fn biases_of_adapted_modules_or_all_of_them_train() {
    assert_eq!(biases(&load(&spec(&[lora("none", false)]))), Vec::<String>::new());
    let of_adapted = biases(&load(&spec(&[lora("lora_only", false)])));
    assert!(of_adapted.iter().any(|name| name == "model.language_model.layers.0.self_attn.q_proj.bias"));
    assert!(of_adapted.iter().any(|name| name == "model.visual.merger.mlp.0.bias"));
    assert!(of_adapted.iter().all(|name| !name.contains("k_proj") && !name.contains("mlp.2")));
    let all = biases(&load(&spec(&[lora("all", false)])));
    let checkpoint =
        Checkpoint::open(std::path::Path::new(MODEL), load(&spec(&[])).policy.model().outline().rules)
            .expect("part of the repository");
    assert!(all.iter().all(|name| checkpoint.stored(name).is_ok()));
    assert!(of_adapted.iter().all(|name| all.contains(name)));
    assert!(all.iter().any(|name| name == "model.visual.merger.mlp.2.bias"));
    assert!(all.iter().any(|name| name == "model.language_model.layers.5.self_attn.k_proj.bias"));
}

#[test]
fn recompute_and_streaming_change_no_bit_of_them() {
    for (bias, dora, activations) in
        [("lora_only", false, "float32"), ("all", false, "bfloat16"), ("all", true, "float32")]
    {
        let of = |mode: Value, offload: &str| {
            let memory = ("memory", json!({"offload": offload}));
            let mut spec = spec(&[lora(bias, dora), recompute(mode), memory]);
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
            assert!(again == (loss, grads.clone()), "{mode} {offload} {bias} {activations}");
        }
    }
}

#[test]
fn their_gradients_are_derivatives() {
    are_derivatives(&shaken(&spec(&[lora("all", false)])));
}

#[test]
fn they_go_out_to_peft_and_come_back() {
    for bias in ["lora_only", "all"] {
        let donor = shaken(&spec(&[lora(bias, false)]));
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
        let from = |bias: &str| {
            let (_, mut lora) = lora(bias, false);
            lora["init_from"] = json!(dir.path());
            spec(&[("lora", lora)])
        };
        let again = load(&from(bias));
        let of_adapters = |fixture: &Fixture| {
            let values = fixture.trainables.to_vec();
            let params = fixture.trainables.layout().params().iter();
            let params = params.filter(|param| param.group == Group::LORA);
            params.flat_map(|param| values[param.range()].to_vec()).collect::<Vec<_>>()
        };
        assert_eq!(of_adapters(&again), of_adapters(&donor), "{bias}");
        let refused = Policy::<Flex>::load(&from("none"), shelf(), DIMS, &Default::default())
            .err()
            .expect("another adapter");
        let told = format!("bias: none in the run file, {bias} in the adapter");
        assert!(refused.to_string().contains(&told), "{refused}");
    }
}

#[test]
fn where_all_biases_train_nothing_stays_the_same_that_could_be_kept() {
    let upper = |bias: &str| {
        let lora = json!({"rank": 2, "targets": r".*layers\.3\..*q_proj", "bias": bias});
        spec(&[("lora", lora), ("cache", json!({"mode": "exact", "tap": "auto"}))])
    };
    assert_eq!(load(&upper("lora_only")).policy.tap(), Some(Tap::Layer(3)));
    let refused =
        Policy::<Flex>::load(&upper("all"), shelf(), DIMS, &Default::default()).err().expect("a vision bias");
    assert!(refused.to_string().contains("`model.visual.blocks.0.attn.qkv` trains"), "{refused}");
}
