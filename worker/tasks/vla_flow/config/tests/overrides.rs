//! What only the task's keys can say on the command line: patterns, and places of its model.

use super::*;

#[test]
fn patterns_keep_the_order_in_which_peft_asks_them() {
    let given = ["lora={}", "lora.rank_pattern={'self_attn.q_proj': 4, q_proj: 16, down_proj: 2}"];
    let written = [("self_attn.q_proj", &4), ("q_proj", &16), ("down_proj", &2)];
    let spec = small(&given);
    assert_eq!(
        spec.settings::<VlaSettings>().unwrap().lora.unwrap().rank_pattern.iter().collect::<Vec<_>>(),
        written
    );
    let travelled = RunSpec::try_from(&coxswain_proto::v1::RunSpecDocument::from(&spec)).unwrap();
    assert_eq!(
        travelled.settings::<VlaSettings>().unwrap().lora.unwrap().rank_pattern.iter().collect::<Vec<_>>(),
        written
    );
}

#[test]
fn patterns_are_those_of_python() {
    let spec = vla(&["lora={}", r"lora.targets='^(?!.*visual).*\.(?P<kind>q|v)_proj$'"]);
    assert!(matches!(spec.lora.unwrap().targets, LoraTargets::Regex(text) if text.starts_with("^(?!")));
    let refused = read(SMALL, &["lora={}", "lora.targets='(?<=a'"]);
    let told = refused.unwrap_err().to_string();
    assert!(told.contains("lora.targets: `(?<=a` is not a regular expression"), "{told}");
}
