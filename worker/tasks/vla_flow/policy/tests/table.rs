//! The table of token embeddings in host memory (`memory.offload: embedding`): the same bits as from one that
//! is where the model is.

use super::*;
use coxswain_models::families::shelf;
use coxswain_models::pretrained::blocks::TablePlace;

const HOST: &str = "embedding";

fn changes(dtype: &str, mode: &str, offload: &str) -> [(&'static str, Value); 4] {
    [
        ("lora", json!({"rank": 2, "targets": EVERYWHERE})),
        ("model", json!({"path": MODEL, "weights_dtype": dtype})),
        ("train", json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode})),
        ("memory", json!({"offload": offload})),
    ]
}

#[test]
fn a_table_in_host_memory_changes_no_bit_of_loss_gradient_or_sample() {
    for (dtype, mode) in
        [("float32", "none"), ("float32", "full"), ("bfloat16", "none"), ("nf4", "selective")]
    {
        let [here, there] = ["none", HOST].map(|offload| shaken(&spec(&changes(dtype, mode, offload))));
        let places = [&here, &there].map(|fixture| fixture.policy.model().table_place());
        assert_eq!(places, [TablePlace::Device, TablePlace::Host]);
        let batch = batch(&[0, 1, 2]);
        assert!(here.run(&batch) == there.run(&batch), "{dtype} {mode}");
        let actions = |fixture: &Fixture| {
            let sampled = fixture.policy.sample_actions(&fixture.trainables, &batch, 1);
            sampled.expect("a sound batch").iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(actions(&here), actions(&there), "{dtype} {mode}");
    }
}

#[test]
fn the_report_shows_the_table_by_itself() {
    let report = |offload| {
        let fixture = shaken(&spec(&changes("bfloat16", "none", offload)));
        let rows = fixture.policy.trainable_report(fixture.trainables.layout(), FrozenDtype::Bfloat16);
        let frozen = rows.into_iter().filter(|row| !row.trains);
        frozen.map(|row| (row.module, row.parameters, row.bytes)).collect::<Vec<_>>()
    };
    let (here, there) = (report("none"), report(HOST));
    let [(_, vision, _), (_, language, bytes)] = &here[..] else { panic!("{here:?}") };
    let [_, (_, rest, rest_bytes), (name, table, table_bytes)] = &there[..] else { panic!("{there:?}") };
    assert_eq!((name.as_str(), *table_bytes), ("embedding", 2 * *table as u64));
    assert_eq!((rest + table, rest_bytes + table_bytes, there[0].1), (*language, *bytes, *vision));
}

#[test]
fn a_table_that_trains_is_refused_there() {
    let train = ("model", json!({"path": MODEL, "train": ["embed_tokens"]}));
    let changes = [("memory", json!({"offload": HOST})), train];
    let loaded = Policy::<Flex>::load(&spec(&changes), shelf(), DIMS, &Default::default());
    let message = loaded.err().expect("its gradient is where the model is").to_string();
    assert!(message.contains("memory.offload") && message.contains("trains"), "{message}");
}
