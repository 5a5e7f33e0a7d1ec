//! A head on action tokens.

use super::*;
use crate::vla_flow::config::FeatureList;

/// Gives a run a head on action tokens.
pub(super) fn change(spec: &mut RunSpec) {
    let mut vla = spec.vla_mut();
    vla.expert = serde_json::from_value(serde_json::json!({"preset": "oft"})).expect("a preset");
    (vla.data.state, vla.data.sensor) = (FeatureList::default(), None);
}

#[test]
fn a_head_on_action_tokens_is_counted_by_hand_and_its_tokens_are_the_prompts() {
    let mut spec = spec("qwen3-vl-4b.yaml");
    let before = Subject::from_spec(&spec, shelf()).expect("no weights are needed").outline;
    change(&mut spec);
    let subject = Subject::from_spec(&spec, shelf()).expect("no weights are needed");
    // Two norms and layers around two blocks, hidden states of 2560, twice as wide inside.
    let (narrow, wide, action) = (2560, 5120, before.dims.action as u64);
    let layer = |inputs: u64, outputs: u64| 2 * inputs + inputs * outputs + outputs;
    let expert = layer(narrow, wide) + 2 * layer(wide, wide) + layer(wide, action);
    assert_eq!((subject.counts.expert, subject.counts.sensor), (expert, 0));
    let more = subject.outline.prompt_tokens - before.prompt_tokens;
    assert!((before.dims.horizon + 9..before.dims.horizon + 24).contains(&more), "{more}");
    assert!(subject.predict(gpu(1, 1)).peak() > 9 << 30);
}
