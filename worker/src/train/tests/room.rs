//! The disk's room for checkpoints.

use std::path::Path;

use coxswain_nn::params::{Group, Init, TrainableLayout};
use coxswain_proto::run_spec::RunSpec;

use crate::train::lack_of_room;

#[test]
fn a_disk_without_room_for_checkpoints_is_told_before_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/quickstart.yaml");
    let output = format!("run.output_dir={}", dir.path().join("not/made").display());
    let spec = RunSpec::load(&file, &[output], coxswain_tasks::TASKS).unwrap();
    let told = |elements: usize, resumes: bool| {
        let mut layout = TrainableLayout::default();
        layout.add("adapter.a".into(), &[elements], Group::LORA, true, Init::Zeros);
        lack_of_room(&spec, &layout, resumes)
    };
    for resumes in [false, true] {
        assert_eq!(told(1, resumes), None);
        let line = told(1 << 55, resumes).unwrap_or_default();
        assert!(line.contains("are free, while a checkpoint takes 384.0 PiB"), "{line}");
    }
    assert!(!dir.path().join("not").exists(), "nothing is made");
}
