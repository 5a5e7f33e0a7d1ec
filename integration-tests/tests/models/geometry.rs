//! Window order, attention segments and patch positions against Transformers' own, for many image grids.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::{fs, path::Path};

use coxswain_models::families::qwen2_5_vl::{config::VisionConfig, windows::WindowPlan};
use serde_json::Value;

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

#[test]
fn windows_segments_and_positions_are_those_of_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden/geometry.json");
    let cases: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for case in cases.as_array().unwrap() {
        let size = |field: &str| case[field].as_u64().unwrap() as usize;
        let config = VisionConfig {
            depth: 1,
            hidden_size: 16,
            intermediate_size: 16,
            num_heads: 1,
            head_dim: 16,
            in_channels: 3,
            patch_size: size("patch"),
            temporal_patch_size: 2,
            spatial_merge_size: 2,
            window_size: size("window"),
            out_hidden_size: 16,
            full_attention_blocks: vec![],
            rope_theta: 1e4,
        };
        let grids: Vec<[u32; 3]> = case["grids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|grid| numbers(grid).try_into().expect("three sides"))
            .collect();
        let plan = WindowPlan::new(&config, &grids).unwrap();
        assert_eq!(plan.order, numbers(&case["order"]), "order of {grids:?}");
        assert_eq!(*plan.windows, numbers(&case["windows"]), "windows of {grids:?}");
        assert_eq!(*plan.frames, numbers(&case["frames"]), "frames of {grids:?}");
        let positions: Vec<Vec<u32>> = case["positions"].as_array().unwrap().iter().map(numbers).collect();
        assert_eq!(
            plan.positions.iter().map(|p| p.to_vec()).collect::<Vec<_>>(),
            positions,
            "positions of {grids:?}"
        );
    }
}
