//! A policy with a head that reads every layer.

use super::*;

#[test]
fn a_head_that_reads_every_layer_is_told_the_state_and_answers_as_evaluation_does() {
    let run = Run::made(&[], |vla| {
        vla.lora = Some(serde_json::from_value(json!({"rank": 2, "alpha": 4.0, "targets": LORA})).unwrap());
        let small = json!({"preset": "qwen_pi", "width": 16, "heads": 2, "ends_width": 8});
        vla.expert = serde_json::from_value(small).unwrap();
        vla.data.sensor = None;
    });
    let left = std::fs::read_to_string(run.dir.path().join(PolicyFile::PATH)).unwrap();
    let left: serde_json::Value = serde_json::from_str(&left).unwrap();
    assert_eq!((&left["format"], &left["flow"]["head"]), (&json!(4), &json!("layerwise")));
    let responder = run.responder();
    assert_near(&answers(&responder, &FRAMES.map(observation)), &expected(&run), 1e-4);
    assert!(responder.reader().describe()["optional"].get("noise").is_some());
}
