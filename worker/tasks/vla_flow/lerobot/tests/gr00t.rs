//! Runs of GR00T N1.7: values are clamped, noise is at 0, hidden states of whole prompts may be kept, and
//! its own dropouts are drawn.

use std::fs;

use coxswain_policies::{directory::GROOT, export::PROCESSORS};
use coxswain_task::StarterJob;
use safetensors::{SafeTensors, serialize_to_file};

use super::*;
use crate::vla_flow::testing::gr00t::{GR00T, policy};

/// What all of LeRobot's names begin with, and none of NVIDIA's.
const OWN: &str = "_groot_model.";
/// As LeRobot calls its step of statistics.
const PACK: &str = "groot_n1_7_pack_inputs_v1";

fn of(policy: &Path, changes: &[(&str, Value)]) -> RunSpec {
    let clamped = "min_max_clamped";
    let own = [
        ("model.backbone", json!(format!("{GR00T}/backbone"))),
        ("data.rename_map", json!({CAMERA: "observation.images.front"})),
        ("data.normalization", json!({"state": clamped, "action": clamped})),
    ];
    spec(policy, &[&own[..], changes].concat())
}

#[test]
fn a_run_of_gr00t_learns_and_leaves_a_policy_that_another_run_starts_from() {
    let dir = policy(0.0);
    let (built, batch) = built(&of(dir.path(), &[])).expect("it is built");
    assert!(batch.actions.iter().chain(&batch.state).all(|value| value.abs() <= 1.0));
    let descended = descend(&built, &batch, 0.01, 8);
    let losses = &descended.0;
    assert!(losses[7] < losses[0], "{losses:?}");
    let left = hold_left(&built, &descended, |policy| of(policy, &[]));
    let directory = PolicyDirectory::from_dir(&left.path().join("policy")).expect("it is read");
    assert_eq!(directory.kind(), GROOT);
    let kept = directory.kept_by(PROCESSORS[0], PACK).expect("there");
    assert_eq!((kept["action.min"].len(), kept["observation.state.max"].len()), (4, 4));
    let behind = directory.steps(PROCESSORS[1]).expect("there");
    assert_eq!(behind[0].config["env_action_dim"], json!(4));
}

#[test]
fn a_run_on_nvidias_own_directory_leaves_the_policy_under_lerobots_names() {
    let (golden, place) = (Path::new(GR00T), tempfile::tempdir().expect("a directory for the test"));
    let (base, made) = (place.path().join("base"), place.path().join("made"));
    fs::create_dir(&base).expect("made");
    fs::copy(golden.join("base/config.json"), base.join("config.json")).expect("copied");
    let bytes = fs::read(golden.join("policy/model.safetensors")).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    // In two shards, as NVIDIA's are.
    let mut index = json!({"weight_map": {}});
    for (number, part) in file.tensors().chunks(file.len().div_ceil(2)).enumerate() {
        let shard = format!("model-{number}.safetensors");
        let named: Vec<_> = part.iter().map(|(name, view)| (name.replacen(OWN, "", 1), view)).collect();
        named.iter().for_each(|(name, _)| index["weight_map"][name] = json!(shard));
        serialize_to_file(named, None, &base.join(shard)).expect("written");
    }
    fs::write(base.join("model.safetensors.index.json"), index.to_string()).expect("written");
    let data = Path::new(DATA);
    let job = StarterJob { data, model: Some(&base), backbone: None, micro_batch: None, asked: false };
    let task = VlaFlow::<Flex>::default();
    let message = built(&of(&base, &[])).err().expect("only the base");
    assert!(message.contains("cox init DATA --model"), "{message}");
    task.make_policy(&job, &made).expect("a base").expect("it is made");
    // The golden model knows three embodiments, and no new one.
    let pack = made.join(PROCESSORS[0]);
    let steps = fs::read_to_string(&pack).expect("there");
    let known = steps.replace(r#""embodiment_tag": "new_embodiment""#, r#""embodiment_tag": "libero_sim""#);
    fs::write(pack, known).expect("written");
    let text = task.starter(&StarterJob { model: Some(&made), ..job }).expect("its data").expect("a policy");
    assert!(text.text.contains("min_max_clamped") && text.text.contains("lr: { expert: 1e-4 }"));
    let of = |policy: &Path| of(policy, &[("data.rename_map", json!({}))]);
    let (built, batch) = built(&of(&made)).expect("it is built");
    let descended = descend(&built, &batch, 0.01, 8);
    let left = hold_left(&built, &descended, of);
    let policy_dir = left.path().join("policy");
    let bytes = fs::read(policy_dir.join("model.safetensors")).expect("a file of its own");
    let left = SafeTensors::deserialize(&bytes).expect("safetensors");
    assert!(left.names().iter().all(|name| name.starts_with(OWN)) && left.len() == file.len());
    assert!(!policy_dir.join("model.safetensors.index.json").exists(), "one file has no index");
}

#[test]
fn hidden_states_that_were_kept_have_the_bits_of_live_ones() {
    let dir = policy(0.2);
    let cached = of(dir.path(), &[("cache.mode", json!("exact"))]);
    let (built, live) = hold_kept(&cached);
    let (_, batch) = self::built(&cached).expect("it is built");
    let trainables = Trainables::<Flex>::new(built.layout, built.initial, &Default::default());
    let without = built.objective.loss(&trainables, &batch).expect("it fits");
    assert_ne!(without.loss_sum / without.valid, live.0[0], "nothing is dropped outside training");
    assert_eq!(digest_of_kept(&cached), digest_of_kept(&cached));
    for (key, value) in [
        ("model.train", json!([r"language_model\.layers\.1"])),
        ("lora", json!({"rank": 2, "targets": ".*language_model.*q_proj"})),
    ] {
        let both = [("cache.mode", json!("exact")), (key, value)];
        let message = self::built(&of(dir.path(), &both)).err().expect(key);
        assert!(message.contains("cache.mode"), "{message}");
    }
}

#[test]
fn what_a_run_of_gr00t_will_take_is_known_before() {
    let (task, dir) = (VlaFlow::<Flex>::default(), policy(0.2));
    let ask = |micro_batch| Ask { micro_batch, world: 1, rank: 0, place: Place::Host { threads: 1 } };
    let targets = r".*(language_model\.layers|action_head)\..*(q_proj|to_q)";
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": targets});
    let exact = [("cache.mode", json!("exact"))];
    for changes in [&[][..], &[("lora", lora)], &exact] {
        let (built, batch) = hold_prediction(&of(dir.path(), changes));
        let (losses, _) = descend(&built, &batch, 0.001, 2);
        assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    }
    let kept = task.sizes(&of(dir.path(), &exact)).expect("it is read");
    assert!(kept.predict(ask(4)).of(Category::Cache) > 0);
    for (key, value) in [
        ("data.normalization", json!({"state": "mean_std", "action": "min_max_clamped"})),
        ("data.horizon", json!(4)),
        ("lora", json!({"rank": 2})),
        ("model.train", json!(["lm_head"])),
    ] {
        let message = built(&of(dir.path(), &[(key, value)])).err().expect(key);
        assert!(message.contains(key), "{key}: {message}");
    }
}
