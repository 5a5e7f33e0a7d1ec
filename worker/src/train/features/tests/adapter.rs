//! Adapters of a generation, on a real policy.

use burn::backend::Flex;
use coxswain_nn::params::Group;
use coxswain_tasks::vla_flow::testing::small::{EVERYWHERE, Fixture, batch, load, shaken, spec};
use serde_json::json;

use crate::train::features::adapter::AdapterSnapshot;

#[test]
fn a_snapshot_of_the_adapters_computes_their_features() {
    let changes =
        [("lora", json!({"rank": 3, "targets": EVERYWHERE})), ("cache", json!({"mode": "periodic"}))];
    let Fixture { policy, mut trainables } = shaken(&spec(&changes));
    let snapshot = AdapterSnapshot::from_trainables(&trainables, Group::LORA);
    let batch = batch(&[0, 1]);
    let then = policy.features_below(&trainables, &batch).expect("sound");
    trainables.set(trainables.to_vec().iter().map(|value| 1.5 * value).collect());
    assert_ne!(policy.features_below(&trainables, &batch).expect("sound"), then);
    assert_ne!(AdapterSnapshot::from_trainables(&trainables, Group::LORA), snapshot);

    let find = |name: &str| {
        let found = snapshot.tensors().find(|(own, ..)| *own == name);
        found.map(|(_, shape, values)| (shape, values))
    };
    let read =
        AdapterSnapshot::from_tensors(trainables.layout(), Group::LORA, find).expect("its own tensors");
    assert_eq!(read, snapshot);
    let old = read.trainables::<Flex>(&Default::default());
    assert_eq!(policy.features_below(&old, &batch).expect("sound"), then);

    let other = load(&spec(&[("lora", json!({"rank": 4, "targets": EVERYWHERE}))])).trainables;
    let error = AdapterSnapshot::from_tensors(other.layout(), Group::LORA, find).expect_err("another rank");
    assert!(error.to_string().contains("lora_A"), "{error}");
    let error =
        AdapterSnapshot::from_tensors(other.layout(), Group::LORA, |_| None).expect_err("nothing there");
    assert!(error.to_string().contains("missing"), "{error}");
}
