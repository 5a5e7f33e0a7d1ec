//! The page on adding a family of models, held by a machine: families have the files that it lists, the map
//! at the top of a folder is of its files, and a family touches as few others as it says.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use coxswain_borders::{
    words::{self, Word},
    workspace,
};

/// Where families are, each in a folder.
const SHELVES: [&str; 2] = ["worker/models/families", TOYS];
/// Families of a program of its own.
const TOYS: &str = "integration-tests/toy/src/families";
const PAGE: &str = "docs/develop/add-a-model.md";
/// How its table of files begins: what families of each kind implement, a column for each.
const TABLE: &str = "| `VlFamily` | `TowersConfig` | `TextFamily` | `TowerDecoderFamily` |";

fn read(path: &Path) -> String {
    let path = workspace::root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Folders of families, from the repository's root.
fn folders(shelf: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(workspace::root().join(shelf)).expect("families have a folder");
    let folders = entries.map(|entry| entry.expect("readable")).filter(|entry| entry.path().is_dir());
    folders.map(|folder| Path::new(shelf).join(folder.file_name())).collect()
}

/// A family's modules but for its tests, each with the file that a path attribute names for it.
fn modules(folder: &Path) -> Vec<(String, Option<PathBuf>)> {
    let text = read(&folder.join("mod.rs"));
    let (mut modules, mut above) = (Vec::new(), "");
    for line in text.lines() {
        let declared =
            line.trim_start_matches("pub ").strip_prefix("mod ").and_then(|it| it.strip_suffix(';'));
        if let Some(name) = declared.filter(|_| above != "#[cfg(test)]") {
            let path = above.strip_prefix("#[path = \"").and_then(|path| path.strip_suffix("\"]"));
            modules.push((name.to_owned(), path.map(|path| folder.join(path))));
        }
        above = line;
    }
    modules
}

/// The names in the map at the top of a folder's `mod.rs`.
fn map(folder: &Path) -> BTreeSet<String> {
    let text = read(&folder.join("mod.rs"));
    let lines = text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim_start);
    let map = lines.skip_while(|line| *line != "```text").skip(1).take_while(|line| *line != "```");
    // What a file is, stands behind the last name of a line.
    let names = map.flat_map(|line| line.split(" · ")).filter_map(|part| part.split_whitespace().next());
    names.map(str::to_owned).collect()
}

/// What its files have in them and the files of the page's table, by kind of family, the closest description
/// first.
fn listed() -> [(&'static str, Vec<String>); 4] {
    let page = read(Path::new(PAGE));
    let rows = page.lines().skip_while(|line| !line.starts_with(TABLE)).skip(2);
    let rows: Vec<Vec<&str>> =
        rows.take_while(|line| line.starts_with('|')).map(|row| row.split('|').collect()).collect();
    let column = |at: usize| {
        let cells = rows.iter().flat_map(|row| row[at].split(','));
        let names = cells.map(|cell| cell.trim().trim_matches('`').trim_end_matches(".rs").to_owned());
        names.filter(|name| !name.is_empty()).collect()
    };
    [
        ("impl TowersConfig for", column(2)),
        ("impl VlFamily for", column(1)),
        ("impl TextFamily for", column(3)),
        ("Result<TowerDecoderSizes, ModelError>", column(4)),
    ]
}

fn assert_none(what: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{what}:\n  {}", broken.join("\n  "));
}

#[test]
fn families_have_the_files_that_the_page_lists() {
    let mut missing = Vec::new();
    let listed = listed();
    let enough = listed.iter().zip([4, 4, 4, 1]).all(|((_, files), least)| files.len() >= least);
    assert!(enough, "{PAGE}: its table has changed: {listed:?}");
    for folder in SHELVES.into_iter().flat_map(folders) {
        let modules = modules(&folder);
        let file = |(name, path): &(String, Option<PathBuf>)| {
            path.clone().unwrap_or_else(|| folder.join(format!("{name}.rs")))
        };
        let files = modules.iter().map(file).filter(|file| workspace::root().join(file).is_file());
        let texts: Vec<_> = files.map(|file| read(&file)).collect();
        let implements = |kind: &str| texts.iter().any(|text| text.contains(kind));
        let Some((_, files)) = listed.iter().find(|(kind, _)| implements(kind)) else {
            panic!("{} implements no trait of families: correct the test", folder.display());
        };
        let is_missing = |file: &&String| !modules.iter().any(|(name, _)| name == *file);
        missing.extend(files.iter().filter(is_missing).map(|file| format!("{}: {file}", folder.display())));
    }
    assert_none("files of the page that a family has not", &missing);
}

#[test]
fn the_map_of_a_familys_folder_is_of_its_files() {
    let mut broken = Vec::new();
    for folder in SHELVES.into_iter().flat_map(folders) {
        // What is another folder's has its place in that one's map.
        let own = modules(&folder).into_iter().filter(|(_, path)| path.is_none());
        let (own, map): (BTreeSet<_>, _) = (own.map(|(name, _)| name).collect(), map(&folder));
        broken.extend(own.symmetric_difference(&map).map(|name| format!("{}: {name}", folder.display())));
    }
    assert_none("modules that only one of map and folder has", &broken);
}

/// A family's own folder aside: its line, a run file, and a page. Tests may name what they like.
#[test]
fn a_family_needs_three_files_besides_its_own() {
    let (root, folders) = (workspace::root(), folders(TOYS));
    assert!(folders.len() >= 2, "{TOYS} has moved: correct the test");
    let endings = [".rs", ".toml", ".yaml", ".yml", ".md", ".json", ".py", ".sh", ".proto", ".lock"];
    let is_looked_at = |file: &PathBuf| {
        let in_tests = file.components().any(|part| part.as_os_str() == "tests");
        !in_tests && !folders.iter().any(|folder| file.starts_with(folder))
    };
    let files: Vec<_> = workspace::files(&root, &endings).into_iter().filter(is_looked_at).collect();
    for folder in &folders {
        let name: &'static str = folder.file_name().expect("a folder").to_string_lossy().into_owned().leak();
        let is_named = |file: &&PathBuf| {
            let bytes = fs::read(root.join(file)).expect("it was found a moment ago");
            !words::lines_with(&String::from_utf8_lossy(&bytes), &[Word::Whole(name)]).is_empty()
        };
        let named: BTreeSet<_> = files.iter().filter(is_named).cloned().collect();
        let run_file = format!("integration-tests/toy/{name}.yaml");
        let expected = [format!("{TOYS}/mod.rs"), run_file, PAGE.to_owned()].map(PathBuf::from);
        assert_eq!(named, expected.into(), "files that name {name}");
    }
}
