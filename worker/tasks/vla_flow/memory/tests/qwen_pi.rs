//! A head that reads every layer.

use super::*;

/// Gives a run a head that reads every layer.
pub(super) fn change(spec: &mut RunSpec) {
    let mut vla = spec.vla_mut();
    vla.expert = serde_json::from_value(serde_json::json!({"preset": "qwen_pi"})).expect("a preset");
    vla.data.sensor = None;
}

#[test]
fn a_head_that_reads_every_layer_is_counted_by_hand_and_its_state_is_in_the_prompt() {
    let mut spec = spec("qwen3-vl-4b.yaml");
    let before = Subject::from_spec(&spec, shelf()).expect("no weights are needed").outline;
    change(&mut spec);
    let subject = Subject::from_spec(&spec, shelf()).expect("no weights are needed");
    let layer = |inputs: u64, outputs: u64| inputs * outputs + outputs;
    let (width, action, horizon) = (1024, before.dims.action as u64, before.dims.horizon as u64);
    // A norm and a projection of each of 36 layers: as many as starVLA says that it has.
    let source = 2 * 2560 + layer(2560, width);
    assert_eq!(36 * source, 94_593_024);
    let attention = 3 * layer(width, width) + width * width;
    let block =
        source + layer(width, 2 * width) + attention + layer(width, 4 * width) + layer(4 * width, width);
    let time = layer(256, width) + layer(width, width);
    let tokens =
        layer(action, width) + layer(2 * width, width) + layer(width, width) + (32 + horizon) * width;
    let decoder = layer(width, 1024) + layer(1024, action);
    assert_eq!(subject.counts.expert, 36 * block + time + tokens + decoder);
    let more = subject.outline.prompt_tokens - before.prompt_tokens;
    assert!((4 * before.dims.state..4 * before.dims.state + 24).contains(&more), "{more}");
    // Beside the model it has 36 hidden states and their gradients.
    assert!(subject.predict(gpu(1, 1)).peak() > 9 << 30);
}
