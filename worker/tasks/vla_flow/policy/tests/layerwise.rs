//! A head that reads every layer of the language model: gradients into each of them, features kept below all
//! that it reads, and what is refused.

use super::*;
use crate::vla_flow::data::SampleDims;

/// Adapters on all layers of the language model.
const LANGUAGE: &str = r".*language_model.*(q_proj|down_proj)";

/// A run with the head, adapters and the cache as given.
fn layerwise(lora: Value, dropout: f64, changes: &[(&str, Value)]) -> RunSpec {
    let expert = json!({"preset": "qwen_pi", "width": 16, "heads": 2, "ends_width": 8, "dropout": dropout});
    spec(&[&[("expert", expert), ("lora", lora)][..], changes].concat())
}

fn lora(targets: &str, dropout: f64) -> Value {
    // Of a scale at which a difference takes few units of the decoder's ReLU across 0.
    json!({"rank": 2, "alpha": 4.0, "targets": targets, "dropout": dropout})
}

/// The policy of such a run, with every zero start replaced.
fn fixture(spec: &RunSpec) -> Fixture {
    let dims = SampleDims { sensor_window: 0, sensor_channels: 0, ..DIMS };
    let loaded = Policy::<Flex>::load(spec, shelf(), dims, &Default::default());
    let (policy, layout, values) = loaded.unwrap_or_else(|error| panic!("{error}"));
    let values = values.iter().zip(normal(layout.len(), 77)).map(|(v, n)| v + 0.05 * n).collect();
    Fixture { policy, trainables: Trainables::new(layout, values, &Default::default()) }
}

fn stateless() -> (&'static str, Value) {
    ("data", json!({"path": "unused", "cameras": ["unused"], "state": "none"}))
}

#[test]
fn gradients_go_back_into_every_layer_and_are_derivatives() {
    let fixture = fixture(&layerwise(lora(EVERYWHERE, 0.0), 0.0, &[]));
    are_slopes(&fixture, 2e-4);
    split(&fixture);
    let (loss, grads) = fixture.run(&batch(&[0, 1]));
    assert_eq!(fixture.policy.loss(&fixture.trainables, &batch(&[0, 1])).expect("sound"), loss);
    for param in fixture.trainables.layout().params().iter().filter(|param| param.group == Group::LORA) {
        assert!(grads.values()[param.range()].iter().any(|value| *value != 0.0), "{}", param.name);
    }
}

#[test]
fn recompute_changes_no_bit_of_it() {
    for (targets, dropout) in [(EVERYWHERE, 0.3), (r".*language_model\.layers\.[34]\..*v_proj", 0.0)] {
        let with = |mode: Value| {
            let train = json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode});
            fixture(&layerwise(lora(targets, dropout), 0.2, &[("train", train)])).run(&batch(&[0, 1, 2]))
        };
        let unchecked = with(json!("none"));
        for mode in [json!("selective"), json!("full"), json!({"every": 2})] {
            assert!(with(mode.clone()) == unchecked, "{mode} with {targets}");
        }
    }
}

#[test]
fn features_are_kept_below_all_that_it_reads_and_change_no_bit() {
    let exact = ("cache", json!({"mode": "exact"}));
    for (lora, more, tap) in [
        (lora(LANGUAGE, 0.0), vec![], Tap::Vision),
        // A state is told in the prompt, which names of kept features do not say.
        (Value::Null, vec![], Tap::Vision),
        (Value::Null, vec![stateless()], Tap::Layer(1)),
    ] {
        let fixture = fixture(&layerwise(lora, 0.0, &[&more[..], std::slice::from_ref(&exact)].concat()));
        assert_eq!(fixture.policy.tap(), Some(tap));
        let whole = batch(&[0, 1, 2]);
        let features = fixture.policy.features_below(&fixture.trainables, &whole).expect("sound");
        let kept = MicroBatch { pixel_values: vec![], features: Some(features), ..whole.clone() };
        assert!(fixture.run(&kept) == fixture.run(&whole), "{tap}");
    }
}

#[test]
fn a_cache_above_what_it_reads_is_refused_by_key() {
    for (cache, more, expected) in [
        (json!({"mode": "periodic"}), vec![], "cache.mode: is `periodic`"),
        (
            json!({"mode": "exact", "tap": "final"}),
            vec![stateless()],
            "cache.tap: is the final hidden states",
        ),
        (
            json!({"mode": "exact", "tap": {"layer": 2}}),
            vec![stateless()],
            "cache.tap: is the input of decoder layer 2",
        ),
        (json!({"mode": "exact", "tap": {"layer": 0}}), vec![], "cache.tap: is the input of decoder layer 0"),
    ] {
        let spec = layerwise(Value::Null, 0.0, &[&more[..], &[("cache", cache)]].concat());
        let loaded = Policy::<Flex>::load(&spec, shelf(), DIMS, &Default::default());
        let message = loaded.err().expect("refused").to_string();
        assert!(message.starts_with(expected), "{message}");
    }
}
