//! Statistics, held against those that LeRobot's own package has written.

use std::{fs, path::Path};

use coxswain_data::lerobot::{Catalog, stats::Stats};
use coxswain_survey::{Job, StatsOutcome, fill};
use serde_json::json;
use tempfile::TempDir;

use crate::sets::{copied, edit, read, recording, repository, with_videos};

const CAMERA: &str = "observation.images.corner2";

fn filled(dir: &Path, anew: bool, force: bool) -> Option<StatsOutcome> {
    fill(&Job { dir, anew, force, progress: &|_, _| {} }).unwrap()
}

fn mini() -> TempDir {
    copied(&repository("configs/assets/metaworld-mini"))
}

/// Every statistic of `ours` is that of `theirs`, within what float32 and a bin of the histogram leave open.
fn compare(ours: &Stats, theirs: &Stats) {
    for (feature, theirs) in &theirs.0 {
        let ours = &ours.0[feature];
        for (name, theirs_of) in theirs {
            // LeRobot squares bytes in bytes: its deviations of pictures are none.
            if feature == CAMERA && name == "std" {
                continue;
            }
            assert_eq!(ours[name].len(), theirs_of.len(), "{feature}.{name}");
            for (dim, (a, b)) in ours[name].iter().zip(theirs_of).enumerate() {
                let range = theirs["max"][dim.min(theirs["max"].len() - 1)]
                    - theirs["min"][dim.min(theirs["min"].len() - 1)];
                let within = if name.starts_with('q') { range / 5000.0 } else { 2e-6 * (range + b.abs()) };
                assert!((a - b).abs() <= within, "{feature}.{name}[{dim}]: {a} instead of {b}");
            }
        }
    }
}

#[test]
fn they_are_those_of_lerobot() {
    let dir = mini();
    let path = dir.path().join("meta/stats.json");
    let theirs = Stats::read_file(&path).unwrap().unwrap();
    // A copy that ran out of space leaves a file with nothing in it.
    fs::write(&path, "").unwrap();
    let done = filled(dir.path(), false, false).unwrap();
    assert_eq!((&done.path, &done.beside), (&path, &None));
    let ours = Stats::read_file(&path).unwrap().unwrap();
    compare(&ours, &theirs);
    // numpy, in float64, over all pixels of all frames, of which each episode has fewer than a hundred.
    for (ours, numpy) in
        ours.0[CAMERA]["std"].iter().zip([0.196951157644083, 0.225150003872203, 0.234253838584917])
    {
        assert!((ours - numpy).abs() < 1e-9, "{ours} instead of {numpy}");
    }
    assert_eq!(read(&path)[CAMERA]["mean"].as_array().unwrap().len(), 3);
    assert!(read(&path)[CAMERA]["mean"][0][0][0].is_f64(), "channels, and two axes of one");
    assert!(filled(dir.path(), false, false).is_none(), "nothing is missing any more");
}

#[test]
fn what_is_there_is_kept_and_a_file_is_replaced_only_when_asked() {
    let dir = mini();
    let path = dir.path().join("meta/stats.json");
    edit(&path, |stats| {
        stats["action"]["mean"][0] = json!(0.125);
        stats["action"].as_object_mut().unwrap().remove("q99");
        stats["note"] = json!({"by": "hand"});
    });
    let before = fs::read(&path).unwrap();
    // What lies in the file's way stands for a disk that may only be read.
    let taken = dir.path().join(format!("meta/stats.computed.json.partial-{}", std::process::id()));
    fs::create_dir(&taken).unwrap();
    let refused =
        fill(&Job { dir: dir.path(), anew: false, force: false, progress: &|_, _| {} }).unwrap_err();
    assert!(refused.to_string().contains("cannot be written: "), "{refused}");
    assert!(refused.to_string().contains("cp -rs"), "{refused}");
    fs::remove_dir(&taken).unwrap();
    let done = filled(dir.path(), false, false).unwrap();
    let beside = dir.path().join("meta/stats.computed.json");
    assert_eq!((&done.path, &done.beside), (&beside, &Some(path.clone())));
    assert_eq!(done.computed.len(), 1);
    assert_eq!(done.computed[0].statistics, ["q99"]);
    assert_eq!(fs::read(&path).unwrap(), before);
    let refused =
        fill(&Job { dir: dir.path(), anew: false, force: false, progress: &|_, _| {} }).unwrap_err();
    assert!(refused.to_string().contains("stats.computed.json: (file): already exists"), "{refused}");
    assert_eq!(filled(dir.path(), false, true).unwrap().path, path);
    let now = read(&path);
    assert_eq!((&now["action"]["mean"][0], &now["note"]["by"]), (&json!(0.125), &json!("hand")));
    assert_eq!(now["action"]["q99"].as_array().unwrap().len(), 4);
    filled(dir.path(), true, true).unwrap();
    assert_ne!(read(&path)["action"]["mean"][0], json!(0.125));
}

#[test]
fn v21_gets_a_line_for_each_episode() {
    let dir = copied(&repository("integration-tests/fixtures/data/metaworld-v21"));
    let path = dir.path().join("meta/episodes_stats.jsonl");
    let theirs = Catalog::open(dir.path()).unwrap().stats.unwrap();
    fs::remove_file(&path).unwrap();
    filled(dir.path(), false, false).unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count() as u64, catalog.info.episodes);
    let ours = catalog.stats.unwrap();
    for name in ["observation.state", "action"] {
        for (a, b) in ours.0[name]["mean"].iter().zip(&theirs.0[name]["mean"]) {
            assert!((a - b).abs() < 1e-6, "{name}: {a} instead of {b}");
        }
    }
}

#[test]
fn frames_of_videos_count_and_damaged_data_leave_nothing_behind() {
    let dir = with_videos();
    let path = dir.path().join("meta/stats.json");
    let _ = fs::remove_file(&path);
    filled(dir.path(), false, false).unwrap();
    let stats = Stats::read_file(&path).unwrap().unwrap();
    let camera = &stats.0["observation.images.front"];
    assert_eq!(camera["count"], [39.0]);
    assert!(camera["mean"].iter().all(|mean| (0.05..0.95).contains(mean)) && camera["std"][0] > 0.01);
    let broken = recording(|episode, frame, row| {
        if episode == 2 && frame == 2 {
            row.state[0] = f32::INFINITY;
        }
    });
    let refused =
        fill(&Job { dir: broken.path(), anew: false, force: false, progress: &|_, _| {} }).unwrap_err();
    let says = refused.to_string();
    for part in ["file-002.parquet", "episode 2: observation.state", "element 0 is inf", "`cox data check`"] {
        assert!(says.contains(part), "{part:?} is not in: {says}");
    }
    let left: Vec<_> =
        fs::read_dir(broken.path().join("meta")).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("stats")), "{left:?}");
}
