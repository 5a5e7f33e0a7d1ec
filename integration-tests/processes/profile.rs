//! `cox profile`: the parts of a step add up to it, and nothing but the picture is left.

use serde_json::Value;

use crate::support::cox;

fn parts<'a>(of: &'a Value, kind: &str) -> Vec<&'a str> {
    let inner = of["inner"].as_array().expect("a list");
    let named = inner.iter().filter(|part| part["kind"] == kind);
    named.filter_map(|part| part["name"].as_str()).filter(|name| !name.is_empty()).collect()
}

fn ms(of: &Value) -> f64 {
    of["ms"].as_f64().expect("a number")
}

#[test]
fn the_parts_of_a_step_add_up_and_nothing_but_the_picture_is_left() {
    let dir = tempfile::tempdir().expect("a directory");
    let (picture, scratch) = (dir.path().join("profile.svg"), dir.path().join("tmp"));
    std::fs::create_dir(&scratch).expect("a directory");
    let out = picture.display().to_string();
    let profile = |steps: &str| {
        let arguments = [
            "profile",
            "configs/quickstart.yaml",
            "train.recompute=full",
            "--json",
            "--out",
            &out,
            "--steps",
        ];
        cox(&arguments).arg(steps).env("TMPDIR", &scratch).output().expect("cox was built")
    };
    let found = profile("2");
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let profile_of: Value = serde_json::from_slice(&found.stdout).expect("JSON");
    let all = &profile_of["all"];
    assert_eq!(parts(all, "phase"), ["data", "forward", "backward", "communication", "optimizer"]);
    let phase =
        |name: &str| all["inner"].as_array().expect("a list").iter().find(|part| part["name"] == name);
    let forward = phase("forward").expect("a forward pass");
    assert_eq!(parts(forward, "stage"), ["vision", "language", "expert"]);
    let language = &forward["inner"].as_array().expect("a list")[1];
    assert!(parts(language, "layer").len() > 1 && !parts(&language["inner"][0], "operation").is_empty());
    let whole = ms(all);
    let sum: f64 = all["inner"].as_array().expect("a list").iter().map(ms).sum();
    assert!(sum <= whole && sum > 0.9 * whole, "{sum} of {whole} ms are in some phase");
    let optimizer = phase("optimizer").expect("an update");
    assert!(parts(optimizer, "stage").is_empty(), "a dry run is none of a step's stages: {optimizer}");
    let text = phase("backward").expect("a backward pass").to_string();
    assert!(text.contains("\"recompute\"") && text.contains("\"LoRA linear, backward\""), "{text}");
    assert!(all["peak_bytes"].as_u64() > Some(1 << 20), "memory is counted");
    let svg = std::fs::read_to_string(&picture).expect("the picture");
    assert!(svg.starts_with("<svg ") && svg.contains("layer 0"));
    assert_eq!(std::fs::read_dir(&scratch).expect("a directory").count(), 0);

    let refused = profile("1000000");
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && told.contains("--steps 1000000: must be at most "), "{told}");
    assert_eq!(std::fs::read_dir(&scratch).expect("a directory").count(), 0);
}
