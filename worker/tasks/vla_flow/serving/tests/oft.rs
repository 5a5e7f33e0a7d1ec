//! A policy with a head on action tokens.

use super::*;
use crate::vla_flow::config::FeatureList;

#[test]
fn a_head_on_action_tokens_answers_from_what_a_run_has_left_and_takes_no_noise() {
    let run = Run::made(&[], |vla| {
        vla.lora = Some(serde_json::from_value(json!({"rank": 2, "alpha": 4.0, "targets": LORA})).unwrap());
        vla.expert = serde_json::from_value(json!({"preset": "oft"})).unwrap();
        (vla.data.state, vla.data.sensor) = (FeatureList::default(), None);
    });
    let left = std::fs::read_to_string(run.dir.path().join(PolicyFile::PATH)).unwrap();
    let left: serde_json::Value = serde_json::from_str(&left).unwrap();
    assert_eq!((&left["format"], &left["flow"]["head"]), (&json!(4), &json!("oft")));
    assert!(left["prompt"].as_str().unwrap().ends_with("robot actions: <action>🔍🔍🔍🔍"), "{left}");
    let (responder, observations) = (run.responder(), FRAMES.map(observation));
    assert_near(&answers(&responder, &observations), &expected(&run), 1e-4);
    let reader = responder.reader();
    assert!(reader.describe()["optional"].get("noise").is_none());
    let mut noisy = observation(0);
    noisy.insert("noise".into(), Value::numbers(vec![4, 2], vec![0.0; 8]));
    let refused = reader.read(&noisy).expect_err("it draws none");
    assert!(refused.problem.contains("leave it out"), "{}", refused.problem);
}
