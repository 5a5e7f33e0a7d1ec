//! Symbolic links that somebody else has put into a run's directory: what they point to stays as it is.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use crate::support::{Toy, refused};

const SHORT: [&str; 4] =
    ["train.steps=4", "train.checkpoint_every=2", "optimizer.warmup_steps=2", "eval.samples=4"];

/// Every file below a directory, by its path there.
fn files(dir: &Path) -> Vec<PathBuf> {
    let (mut found, mut open) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(below) = open.pop() {
        for entry in fs::read_dir(dir.join(&below)).expect("a directory") {
            let entry = entry.expect("an entry");
            let path = below.join(entry.file_name());
            match entry.path().is_dir() {
                true => open.push(path),
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_run_writes_through_no_link_of_its_directory() {
    let toy = Toy::new(500);
    toy.train("before", &SHORT);
    // What is written elsewhere first and comes by a rename has other names for a while.
    let drafts = |path: PathBuf| {
        let name = path.file_name().expect("a file").to_string_lossy().into_owned();
        [format!("{name}.tmp"), format!(".{name}.tmp"), name].map(|name| path.with_file_name(name))
    };
    let mut names: Vec<_> = files(&toy.path("before"))
        .into_iter()
        .filter(|path| !path.starts_with("checkpoints"))
        .flat_map(drafts)
        .collect();
    names.extend(["coordinator/.journal-copy", ".tmp-best"].map(PathBuf::from));
    names.extend([2, 4].map(|step| format!("checkpoints/.tmp-step-{step:08}").into()));
    let targets = toy.path("targets");
    fs::create_dir(&targets).expect("a directory");
    let mut links = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let (target, link) = (targets.join(number.to_string()), toy.path("run").join(name));
        // Every other one leads nowhere, and the journal's, which is read before it is written.
        if number % 2 == 0 && !name.ends_with("journal.redb") {
            fs::write(&target, "precious").expect("a file");
        }
        fs::create_dir_all(link.parent().expect("below the run")).expect("a directory");
        symlink(target, &link).expect("a link");
        links.push(link);
    }
    assert!(links.len() > 40, "{names:?}");
    let contents = || -> BTreeMap<_, _> {
        let text = |path: PathBuf| (fs::read_to_string(targets.join(&path)).expect("a text"), path);
        files(&targets).into_iter().map(text).map(|(text, path)| (path, text)).collect()
    };
    let before = contents();
    // What a launch stumbles over it names, and a person removes it.
    let printed = loop {
        let (code, printed) = refused(toy.command("run", &SHORT));
        assert_eq!(contents(), before, "{printed}");
        if code == Some(0) {
            break printed;
        }
        let refusal = |link: &Path| {
            let name = link.file_name().expect("a file").to_string_lossy();
            [format!("`{name}` is a symbolic link"), format!("{}: ", link.display())]
        };
        let is_named = |link: &&PathBuf| {
            link.is_symlink() && refusal(link).iter().any(|refusal| printed.contains(refusal))
        };
        let named = links.iter().find(is_named);
        let named = named.unwrap_or_else(|| panic!("it names no link: {printed}"));
        fs::remove_file(named).expect("a link");
    };
    let left = links.iter().filter(|link| link.is_symlink()).count();
    assert!(left > 20, "{left} are left of {}: {printed}", links.len());
    toy.assert_audited("run", 4);
    assert_eq!(toy.network("run"), toy.network("before"));
}
