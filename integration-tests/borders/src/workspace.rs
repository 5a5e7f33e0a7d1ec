//! The workspace, as `cargo metadata` tells it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// One crate of the workspace.
#[derive(Clone, Debug)]
pub struct Package {
    /// Name.
    pub name: String,
    /// Directory, relative to the workspace's.
    pub dir: PathBuf,
    /// Roots of its library and programs, relative to the workspace's directory.
    pub roots: Vec<PathBuf>,
    /// What it is built with by name, by its build script too; not what only its tests and benchmarks are
    /// made with.
    pub dependencies: BTreeSet<String>,
}

/// The workspace's directory: this crate lies two levels below it.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("the crate lies in integration-tests").to_path_buf()
}

/// All crates of the workspace, by name.
pub fn packages() -> BTreeMap<String, Package> {
    let root = root();
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let answer = Command::new(env!("CARGO")).args(arguments).current_dir(&root).output().expect("cargo runs");
    assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    let metadata: Value = serde_json::from_slice(&answer.stdout).expect("cargo prints JSON");
    let list = metadata["packages"].as_array().expect("a list of packages");
    list.iter().map(|package| read(package, &root)).map(|package| (package.name.clone(), package)).collect()
}

fn read(package: &Value, root: &Path) -> Package {
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let relative = |value: &Value| {
        let path = PathBuf::from(text(value));
        path.strip_prefix(root).expect("it lies in the workspace").to_path_buf()
    };
    let is_product = |target: &Value| list(&target["kind"]).iter().any(|kind| kind == "lib" || kind == "bin");
    // Tests and benchmarks may be made with what the crate itself must not know.
    let built_with: Vec<_> =
        list(&package["dependencies"]).into_iter().filter(|of| of["kind"] != "dev").collect();
    let targets = list(&package["targets"]).into_iter().filter(is_product);
    Package {
        name: text(&package["name"]),
        dir: relative(&package["manifest_path"]).parent().expect("a file lies in a directory").to_path_buf(),
        roots: targets.map(|target| relative(&target["src_path"])).collect(),
        dependencies: built_with.iter().map(|of| text(&of["name"])).collect(),
    }
}

/// Crates of the workspace that `name` is built with, itself not among them, each with the way that leads to
/// it: `a -> b -> c`.
pub fn reached(packages: &BTreeMap<String, Package>, name: &str) -> BTreeMap<String, String> {
    let mut ways = BTreeMap::new();
    let mut open = vec![(name.to_owned(), name.to_owned())];
    while let Some((at, way)) = open.pop() {
        let Some(package) = packages.get(&at) else { continue };
        for next in package.dependencies.iter().filter(|next| packages.contains_key(*next)) {
            if next != name && !ways.contains_key(next) {
                let way = format!("{way} -> {next}");
                ways.insert(next.clone(), way.clone());
                open.push((next.clone(), way));
            }
        }
    }
    ways
}

/// Files of the repository with one of the endings, relative to its directory, sorted. Build outputs and
/// hidden directories are left out.
pub fn files(root: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory of the repository").flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if name.starts_with('.') || name == "target" {
                continue;
            }
            if path.is_dir() {
                open.push(path);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path.strip_prefix(root).expect("it was found below").to_path_buf());
            }
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[&str]) -> (String, Package) {
        let dependencies = dependencies.iter().map(|name| (*name).to_owned()).collect();
        let name = name.to_owned();
        (name.clone(), Package { name, dir: PathBuf::new(), roots: Vec::new(), dependencies })
    }

    #[test]
    fn a_dependency_of_a_dependency_is_reached_and_the_way_is_told() {
        let packages =
            [package("engine", &["middle", "serde"]), package("middle", &["model"]), package("model", &[])];
        let ways = reached(&packages.into(), "engine");
        assert_eq!(ways["model"], "engine -> middle -> model");
        assert!(!ways.contains_key("serde"), "what is not ours is not looked at");
    }
}
