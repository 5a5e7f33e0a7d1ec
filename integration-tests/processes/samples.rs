//! A row that cannot be decoded: tried by another worker, then left out of every epoch, and listed; the run
//! goes on.

use std::{fs, path::Path};

use crate::support::{CoxProcess, read_json, root, tiny::audit};

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory of ours");
    for entry in fs::read_dir(from).expect("the data set is there") {
        let path = entry.expect("a readable entry").path();
        let target = to.join(path.file_name().expect("an entry has a name"));
        match path.is_dir() {
            true => copy_tree(&path, &target),
            false => drop(fs::copy(&path, &target).expect("a file can be copied")),
        }
    }
}

/// Garbles the signature of one image, as it lies in the data file.
fn garble(file: &Path, image: usize) {
    let mut bytes = fs::read(file).expect("the data file");
    let signatures = bytes.windows(PNG.len()).enumerate().filter(|(_, window)| *window == PNG);
    let at = signatures.map(|(at, _)| at).nth(image).expect("so many images");
    bytes[at..at + PNG.len()].fill(b'?');
    fs::write(file, bytes).expect("the copy can be written");
}

#[test]
fn a_damaged_row_is_left_out_of_every_epoch_and_listed() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    copy_tree(&root().join("configs/assets/metaworld-mini"), &data);
    garble(&data.join("data/chunk-000/file-000.parquet"), 3);
    let output = dir.path().join("run");
    let (data_path, output_dir) =
        (format!("data.path={}", data.display()), format!("run.output_dir={}", output.display()));
    // Two epochs and a little: the sample's turn comes twice, and it fails in the first only.
    let arguments = [
        "run",
        "configs/quickstart.yaml",
        &data_path,
        &output_dir,
        "train.steps=54",
        "eval.samples=0",
        "optimizer.warmup_steps=2",
    ];
    let (status, printed) = CoxProcess::start(&arguments).finish();
    assert!(status.success(), "{printed}");
    let told: Vec<&str> = printed.lines().filter(|line| line.contains("the sample at position")).collect();
    assert!(told.iter().any(|line| line.contains("another worker tries it")), "{printed}");
    assert!(told.iter().any(|line| line.contains("left out from now on (quarantined)")), "{printed}");
    let failures = told.iter().filter(|line| line.contains("failed on rank")).count();
    assert_eq!(failures, 2, "it is known in the second epoch: {told:#?}");
    assert_eq!(read_json(&output.join("summary.json"))["steps"], 54);

    let audit = audit(&output);
    for epoch in 0..2 {
        let left_out = &audit["epochs"][epoch]["quarantined"];
        assert_eq!(left_out.as_array().map(Vec::len), Some(1), "{audit:#}");
    }
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}");
}
