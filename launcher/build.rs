//! What `cox --version` and a run's `run.json` say of a build beside its version: features, profile,
//! processor, and of a release the commit.

use std::{env, path::Path, process::Command};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let variable = |name| env::var(name).unwrap_or_default();
    let features = match env::var_os("CARGO_FEATURE_CUDA") {
        Some(_) => "features: cuda",
        None => "features: none; `--features cuda` adds NVIDIA GPUs",
    };
    // target/[triple/]PROFILE/build/PACKAGE/out: `PROFILE` itself only says whether it inherits from release.
    let out = variable("OUT_DIR");
    let profile = Path::new(&out).ancestors().nth(3).and_then(Path::file_name).unwrap_or_default();
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    let cpu = flags.split('\u{1f}').rev().find_map(|flag| Some(flag.split_once("target-cpu=")?.1));
    let (target, cpu) = (variable("TARGET"), cpu.unwrap_or("generic"));
    let commit = if profile == "release" { commit().unwrap_or_default() } else { String::new() };
    println!(
        "cargo:rustc-env=COX_BUILT={features}; profile: {}; {target}, cpu: {cpu}{commit}",
        profile.display()
    );
}

/// The commit that a release is built from, where its sources are a repository's. Other profiles are left
/// alone: each commit would build them anew.
fn commit() -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    println!(
        "cargo:rerun-if-changed={}",
        git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?
    );
    let changed =
        if git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty() { "" } else { ", changed" };
    Some(format!("; commit: {}{changed}", git(&["rev-parse", "--short=12", "HEAD"])?))
}
