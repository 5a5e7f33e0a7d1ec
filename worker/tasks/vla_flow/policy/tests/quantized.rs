//! Frozen linears of few bits (`model.weights_dtype: nf4 | int8`). Values and gradients are held against
//! bitsandbytes and PEFT by the golden cases.

use coxswain_models::families::shelf;
use coxswain_nn::{
    dtypes::FrozenDtype,
    lora::{AdapterOrigin, write_adapter},
};
use coxswain_task::Task;

use super::*;
use crate::vla_flow::VlaFlow;

const FEW_BITS: [&str; 2] = ["nf4", "int8"];

fn model(dtype: &str) -> (&'static str, Value) {
    ("model", json!({"path": MODEL, "weights_dtype": dtype}))
}

#[test]
fn recompute_changes_no_bit_over_weights_of_few_bits() {
    for (dtype, dropout) in FEW_BITS.into_iter().zip([0.3, 0.0]) {
        let lora = ("lora", json!({"rank": 2, "targets": EVERYWHERE, "dropout": dropout}));
        let of = |mode: &Value| {
            let train = json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode});
            shaken(&spec(&[model(dtype), lora.clone(), ("train", train)])).run(&batch(&[0, 1, 2]))
        };
        let kept = of(&json!("none"));
        for mode in [json!("selective"), json!("full"), json!({"every": 2})] {
            assert!(of(&mode) == kept, "{dtype} {mode}");
        }
    }
}

/// Four bits are another model, eight are nearly the same.
#[test]
fn the_model_is_near_the_one_that_was_quantized() {
    let hidden = |dtype: &str| {
        let fixture = load(&spec(&[model(dtype), ("lora", Value::Null)]));
        let features = fixture.policy.vl_features(&fixture.trainables, &batch(&[0, 1])).expect("sound");
        download(features.hidden_nd)
    };
    let whole = hidden("bfloat16");
    let [four, eight] = FEW_BITS.map(|dtype| relative_error(&hidden(dtype), &whole));
    assert!(eight > 0.0 && eight < 0.02 && four > eight && four < 0.3, "{four} {eight}");
}

#[test]
fn what_trains_in_full_begins_with_the_values_of_the_file() {
    let train = [r"layers\.2\.mlp", r"layers\.4\.self_attn\.q_proj"];
    let of = |dtype: &str| {
        let model = ("model", json!({"path": MODEL, "weights_dtype": dtype, "train": train}));
        load(&spec(&[model, ("lora", Value::Null)]))
    };
    let (few, whole) = (of("nf4"), of("float32"));
    assert_eq!(few.trainables.to_vec(), whole.trainables.to_vec());
    let (_, gradients) = few.run(&batch(&[0, 1, 2]));
    assert!(few.trainables.layout().params().iter().all(|param| gradients.touched(param)));
}

#[test]
fn the_linears_of_the_language_model_are_quantized_and_nothing_else() {
    let fixture = load(&spec(&[model("nf4")]));
    let outline = fixture.policy.model().outline();
    let tensors = outline.tensors();
    let packed = |name: &str| name.ends_with("_proj.weight") && name.contains("language_model");
    for tensor in &tensors {
        assert_eq!(tensor.packs.is_some(), packed(&tensor.name), "{}", tensor.name);
        let linear = tensor.name.trim_end_matches(".weight");
        assert!(tensor.packs.is_none() || (outline.rules.packs)(linear), "{}", tensor.name);
    }
    let of = |dtype: FrozenDtype| {
        let rows = fixture.policy.trainable_report(fixture.trainables.layout(), dtype);
        rows.into_iter().filter(|row| !row.trains).map(|row| (row.dtype, row.bytes)).collect::<Vec<_>>()
    };
    let (few, half) = (of(FrozenDtype::Nf4), of(FrozenDtype::Bfloat16));
    assert_eq!([few[0], half[0]].map(|(dtype, _)| dtype), ["bfloat16"; 2], "the vision tower");
    assert_eq!((few[0].1, few[1].0), (half[0].1, "nf4"));
    // Of 16 bits of each weight there are 4 and an eighth.
    let linears: usize = tensors.iter().filter(|tensor| tensor.packs.is_some()).map(|t| t.elements).sum();
    let saved = (half[1].1 - few[1].1) as f64 / linears as f64;
    assert!((1.48..1.4845).contains(&saved), "{saved} bytes a weight");
}

#[test]
fn an_adapter_is_refused_above_weights_of_other_bits() {
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": ["q_proj"]});
    let donor = shaken(&spec(&[("lora", lora.clone()), model("nf4")]));
    let (dir, plan) = (tempfile::tempdir().expect("a directory"), donor.policy.lora().expect("adapters"));
    let origin = |trained_above| AdapterOrigin {
        base_model: MODEL,
        task_type: None,
        readme: "",
        tied: None,
        trained_above,
    };
    let write = |trained_above| {
        let (layout, values) = (donor.trainables.layout(), donor.trainables.to_vec());
        write_adapter(dir.path(), plan, layout, &values, &origin(trained_above)).expect("written");
    };
    let heir = |dtype: &str| {
        let mut lora = lora.clone();
        lora["init_from"] = json!(dir.path());
        let loaded =
            Policy::<Flex>::load(&spec(&[("lora", lora), model(dtype)]), shelf(), DIMS, &Default::default());
        loaded.map(|_| ()).map_err(|error| error.to_string())
    };
    let task: &dyn Task = &VlaFlow::<Flex>::default();
    let started = |dtype: &str| {
        let read = task.read_weights(&spec(&[("lora", lora.clone()), model(dtype)]), dir.path());
        read.map(|_| ()).map_err(|error| error.to_string())
    };
    write(Some(FrozenDtype::Nf4));
    assert_eq!((heir("nf4"), started("nf4")), (Ok(()), Ok(())));
    for message in [heir("bfloat16"), heir("int8"), started("float32")] {
        let message = message.expect_err("other bits");
        assert!(message.contains("was trained on weights in nf4"), "{message}");
    }
    write(Some(FrozenDtype::Bfloat16));
    // Of rounding alone nothing is made.
    assert_eq!((heir("float32"), started("bfloat16")), (Ok(()), Ok(())));
    let message = heir("nf4").expect_err("other bits");
    assert!(message.starts_with("lora.init_from") && message.contains("in bfloat16"), "{message}");
    // One that does not say, as PEFT writes it.
    write(None);
    assert_eq!((heir("nf4"), heir("float32")), (Ok(()), Ok(())));
}
