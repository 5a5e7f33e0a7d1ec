//! The borders of the house, held by a machine: what the engine may not name, what may not depend on what,
//! where nothing goes in circles, and how large things may be.
//!
//! Each rule finds places that break it. Exceptions are listed below with the reason that they are right; one
//! that is no longer needed fails, too. `PENDING` counts what is not mended yet: it may be lowered and never
//! raised.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use coxswain_borders::{
    imports::{self, Graph},
    lines,
    sizes::{self, Size},
    sources::Sources,
    words::{self, Word},
    workspace::{self, Package},
};

/// Most fields of a struct.
const FIELDS: usize = 15;
/// Most methods of one type, over all its files, and of a trait.
const METHODS: usize = 40;
/// Most parameters of a function, beside `self`.
const PARAMETERS: usize = 5;

/// What a budget may have to spare; a folder that needs less gets a lower one.
const SPARE: usize = 50;

/// Lines of production code, without comments and blank lines: a folder's, without those of folders below it
/// that stand here, too. Budgets fall; what needs more says for what.
const BUDGETS: &[(&str, usize)] = &[
    ("coordinator", 13_730),
    ("launcher", 16_810),
    ("proto/identity", 1450),
    ("proto", 4850),
    ("worker/burn", 10),
    ("worker/cuda", 1970),
    ("worker/data", 4340),
    ("worker/feature_store", 2340),
    ("worker/models", 4800),
    ("worker/models/families/paligemma", 70),
    ("worker/models/families/qwen2_5_vl", 680),
    ("worker/models/families/qwen3_vl", 670),
    ("worker/models/families/smolvlm", 70),
    ("worker/models/families/t5", 1530),
    ("worker/models/joint", 640),
    ("worker/models/two_towers", 2480),
    ("worker/nn", 16_370),
    ("worker/policies", 3080),
    ("worker/policies/gr00t", 1720),
    ("worker/policies/pi", 520),
    ("worker/remote", 1370),
    ("worker/serve", 1430),
    ("worker/src", 18_660),
    ("worker/survey", 1570),
    ("worker/task", 1250),
    ("worker/tasks", 1010),
    ("worker/tasks/vla_flow", 11_030),
    ("worker/tasks/sft", 2370),
    ("worker/tasks/seq2seq", 1580),
    ("worker/tasks/trajectory", 2130),
    ("worker/tasks/separation", 2310),
    ("worker/video", 2240),
];

/// Places that break a rule today.
struct Pending {
    files_that_name_models: usize,
    fields: usize,
    methods: usize,
    parameters: usize,
    tuple_parameters: usize,
    files_that_read_clocks: usize,
}

const PENDING: Pending = Pending {
    files_that_name_models: 0,
    fields: 0,
    methods: 0,
    parameters: 0,
    tuple_parameters: 0,
    files_that_read_clocks: 0,
};

/// Folders, each with the files in it that import each other in circles today. Circles with files elsewhere
/// are the outer folder's.
const CIRCLES: &[(&str, usize)] = &[
    ("coordinator/src", 0),
    ("launcher/src", 0),
    ("proto/identity/src", 0),
    ("proto/src", 0),
    ("worker/burn/src", 0),
    ("worker/cuda/src", 0),
    ("worker/data/src", 0),
    ("worker/feature_store/src", 0),
    ("worker/models", 0),
    ("worker/nn/src", 0),
    ("worker/policies", 0),
    ("worker/serve/src", 0),
    ("worker/src", 0),
    ("worker/survey/src", 0),
    ("worker/task/src", 0),
    ("worker/tasks", 0),
    ("worker/video/src", 0),
];
/// Folders with the files in circles where a parent counts as a user of each child it declares: a child may
/// then not import what its parent's file defines.
const CIRCLES_WITH_PARENTS: &[(&str, usize)] = &[
    ("coordinator/src", 0),
    ("launcher/src", 0),
    ("proto/identity/src", 0),
    ("proto/src", 0),
    ("worker/burn/src", 0),
    ("worker/cuda/src", 0),
    ("worker/data/src", 0),
    ("worker/feature_store/src", 0),
    ("worker/models", 0),
    ("worker/nn/src", 0),
    ("worker/policies", 0),
    ("worker/serve/src", 0),
    ("worker/src", 0),
    ("worker/survey/src", 0),
    ("worker/task/src", 0),
    ("worker/tasks", 0),
    ("worker/video/src", 0),
];

/// What the engine carries and does not know.
const MODEL_NAMES: [Word; 5] = [
    Word::Part("qwen"),
    Word::Part("image_grid"),
    Word::Part("action_expert"),
    Word::Whole("expert"),
    Word::Whole("sensor"),
];
/// Where it is at home.
const MODELS_ARE_NAMED_IN: [&str; 6] =
    ["worker/models", "worker/policies", "worker/tasks", "configs", "docs", "integration-tests"];

/// Crates of models, policies and tasks.
const MODEL_CRATES: [&str; 3] = ["coxswain-models", "coxswain-policies", "coxswain-tasks"];
/// Crates that may depend on them: those that put a program together, and tests. Every other crate is the
/// engine's.
const WIRING: [&str; 5] =
    ["coxswain", "coxswain-cuda", "coxswain-integration-tests", "coxswain-borders", "coxswain-toy"];

/// An exception: places that begin like this, and why they are right.
type Exceptions = [(&'static str, &'static str)];

const MANY_FIELDS: &Exceptions = &[
    ("worker/tasks/vla_flow/config/trainables.rs: Expert", "one for each key of the section `expert`"),
    ("worker/tasks/vla_flow/config/trainables.rs: GivenExpert", "the same, each of which may be absent"),
    ("proto/src/run_spec/training.rs: Train", "one for each key of the section `train`"),
    ("worker/tasks/vla_flow/config/data.rs: Data", "one for each key of the section `data`"),
    ("coordinator/src/core/status.rs: Status", "one for each thing that `Control.GetStatus` answers"),
    ("worker/data/src/inspect.rs: Report", "one for each key that `cox data inspect` prints"),
    ("launcher/src/launch/flags.rs: LaunchFlags", "one for each flag that torchrun has"),
    ("worker/src/train/looking/summary.rs: Summary", "one for each key of summary.json"),
];
const MANY_METHODS: &Exceptions = &[(
    "coordinator/src/core/machine/run.rs: Run",
    "the machine's state, on which a file for each kind of event works",
)];
const MANY_PARAMETERS: &Exceptions = &[
    (
        "worker/nn/src/kernels/cube/",
        "a kernel's parameters are the buffers and sizes that its launch binds one by one",
    ),
    ("worker/cuda/src/nvrtc/mod.rs: create", "stands in for a function of NVRTC, which has them"),
];
const TUPLE_PARAMETERS: &Exceptions = &[];
const CLOCKS: &Exceptions = &[
    ("coordinator/src/clock.rs", "the coordinator's one clock"),
    ("launcher/src/clock.rs", "the launcher's one clock"),
    ("worker/cuda/src/clock.rs", "the one clock of the CUDA crate"),
    ("worker/feature_store/src/clock.rs", "the one clock of the store"),
    ("worker/nn/src/profile.rs", "times are what it keeps"),
    ("worker/nn/src/pulse.rs", "when a thread last moved is what it keeps"),
    ("worker/remote/src/clock.rs", "the one clock of what reads buckets"),
    ("worker/serve/src/clock.rs", "the policy server's one clock"),
    ("worker/src/clock.rs", "the engine's one clock"),
    ("worker/task/src/clock.rs", "times the stages of a pass; the only file of its crate"),
];

#[test]
fn the_engine_names_no_model_and_no_task() {
    let root = workspace::root();
    let is_known =
        |file: &Path| MODELS_ARE_NAMED_IN.iter().any(|home| file.starts_with(home)) || is_a_test(file);
    let files = workspace::files(&root, &[".rs", ".proto"]).into_iter().filter(|file| !is_known(file));
    let found = files.filter_map(|file| {
        let text = std::fs::read_to_string(root.join(&file)).expect("it was found a moment ago");
        let lines = words::lines_with(&text, &MODEL_NAMES);
        let (line, shown) = lines.first()?;
        Some(format!("{}:{line}: {} ({} lines)", file.display(), shown.trim(), lines.len()))
    });
    hold("names a model or a task", found.collect(), PENDING.files_that_name_models, &[]);
}

fn is_a_test(file: &Path) -> bool {
    let in_tests = file.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "benches");
    in_tests || file.file_name().is_some_and(|name| name == "tests.rs")
}

/// A family's code is named by its own folder and by the list of families: tasks find it on their shelf.
#[test]
fn families_are_named_by_nobody_but_their_list() {
    const FAMILIES: &str = "worker/models/families";
    let root = workspace::root();
    let entries = std::fs::read_dir(root.join(FAMILIES)).expect("families have a folder");
    let folders = entries.map(|entry| entry.expect("readable").path()).filter(|path| path.is_dir());
    let names: Vec<String> =
        folders.map(|path| path.file_name().expect("a folder").to_string_lossy().into_owned()).collect();
    assert!(names.len() >= 2, "{FAMILIES} has moved: correct the test");
    let is_looked_at = |file: &PathBuf| {
        !file.starts_with("integration-tests")
            && !is_a_test(file)
            && *file != Path::new(FAMILIES).join("mod.rs")
    };
    let mut found = Vec::new();
    for file in workspace::files(&root, &[".rs"]).into_iter().filter(is_looked_at) {
        let text = std::fs::read_to_string(root.join(&file)).expect("it was found a moment ago");
        for name in names.iter().filter(|name| !file.starts_with(Path::new(FAMILIES).join(name))) {
            let is_code = |line: &&str| !line.trim_start().starts_with("//");
            let named = text.lines().filter(is_code).find(|line| names_in_code(line, name));
            found.extend(named.map(|line| format!("{}: {}", file.display(), line.trim())));
        }
    }
    hold("names a family of models", found, 0, &[]);
}

/// Whether a line has this identifier outside the beginning of a text.
fn names_in_code(line: &str, name: &str) -> bool {
    let is_part = |letter: char| letter == '_' || letter.is_ascii_alphanumeric();
    line.match_indices(name).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + name.len()..].chars().next();
        before.is_none_or(|letter| !"\"-".contains(letter) && !is_part(letter))
            && after.is_none_or(|letter| !is_part(letter))
    })
}

#[test]
fn no_crate_of_the_engine_is_built_with_a_model_or_a_task() {
    let packages = workspace::packages();
    for name in WIRING.iter().chain(&MODEL_CRATES).copied() {
        assert!(packages.contains_key(name), "there is no crate {name}: correct the list");
    }
    let is_engine =
        |name: &&String| !WIRING.contains(&name.as_str()) && !MODEL_CRATES.contains(&name.as_str());
    let mut found = Vec::new();
    for name in packages.keys().filter(is_engine) {
        let reached = workspace::reached(&packages, name);
        found.extend(MODEL_CRATES.iter().filter_map(|model_crate| reached.get(*model_crate).cloned()));
    }
    hold("is built with a model or a task", found, 0, &[]);
}

#[test]
fn files_do_not_import_each_other_in_circles() {
    hold_circles(CIRCLES, imports::without_declarations);
}

#[test]
fn children_do_not_import_what_their_parents_define() {
    hold_circles(CIRCLES_WITH_PARENTS, Graph::clone);
}

fn hold_circles(folders: &[(&str, usize)], seen: impl Fn(&Graph) -> Graph) {
    let mut broken = Vec::new();
    for (folder, allowed) in folders {
        let mut graphs = FACTS.graphs.iter().map(&seen);
        let graph = graphs.find(|graph| graph.keys().any(|file| file.starts_with(folder)));
        let graph = graph.unwrap_or_else(|| panic!("there is no folder {folder}: correct the list"));
        let circles = imports::circles(&graph, Path::new(folder));
        let files: usize = circles.iter().map(|circle| circle.len()).sum();
        if files > *allowed {
            broken.push(format!("{folder}: {files} files in circles, {allowed} were known"));
            broken.extend(circles.iter().map(|circle| imports::described(&graph, circle) + "\n"));
        } else if files < *allowed {
            println!("{folder}: {files} files in circles; lower the {allowed} in the list");
        }
    }
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

#[test]
fn structs_have_few_fields() {
    hold(&format!("has more than {FIELDS} fields"), over(&FACTS.fields, FIELDS), PENDING.fields, MANY_FIELDS);
}

#[test]
fn types_have_few_methods() {
    let rule = format!("has more than {METHODS} methods");
    hold(&rule, over(&FACTS.methods, METHODS), PENDING.methods, MANY_METHODS);
}

#[test]
fn functions_have_few_parameters() {
    let rule = format!("has more than {PARAMETERS} parameters");
    hold(&rule, over(&FACTS.parameters, PARAMETERS), PENDING.parameters, MANY_PARAMETERS);
}

#[test]
fn no_parameter_is_a_tuple_of_two_arguments() {
    let found = over(&FACTS.tuple_parameters, 0);
    hold("takes a tuple apart in its parameters", found, PENDING.tuple_parameters, TUPLE_PARAMETERS);
}

#[test]
fn clocks_are_read_in_few_places() {
    let found = FACTS.clocks.iter().map(|(file, count)| format!("{file} ({count} times)"));
    hold("reads a clock", found.collect(), PENDING.files_that_read_clocks, CLOCKS);
}

#[test]
fn every_folder_keeps_to_its_budget_of_lines() {
    let mut counts = BUDGETS.iter().map(|(folder, _)| (*folder, 0)).collect::<BTreeMap<_, _>>();
    let mut found = Vec::new();
    for (file, lines) in &FACTS.lines {
        let folders = BUDGETS.iter().map(|(folder, _)| *folder).filter(|folder| file.starts_with(folder));
        match folders.max_by_key(|folder| folder.len()) {
            Some(folder) => *counts.entry(folder).or_default() += lines,
            None => found.push(format!("{}: no folder with a budget", file.display())),
        }
    }
    found.extend(BUDGETS.iter().filter_map(|(folder, budget)| {
        let lines = counts[folder];
        let kept = lines <= *budget && *budget <= lines + SPARE;
        (!kept).then(|| format!("{folder}: {lines} lines, and its budget is {budget}"))
    }));
    println!("{} lines of production", counts.values().sum::<usize>());
    let advice = "write less, or change BUDGETS in a commit that says for what";
    assert!(found.is_empty(), "{advice}:\n  {}", found.join("\n  "));
}

/// What the production code of the workspace is like.
#[derive(Default)]
struct Facts {
    /// Lines of production code, by file.
    lines: BTreeMap<PathBuf, usize>,
    graphs: Vec<Graph>,
    fields: Vec<Size>,
    methods: Vec<Size>,
    parameters: Vec<Size>,
    tuple_parameters: Vec<Size>,
    clocks: BTreeMap<String, usize>,
}

static FACTS: LazyLock<Facts> = LazyLock::new(|| {
    let mut facts = Facts::default();
    let is_product = |package: &Package| !package.dir.starts_with("integration-tests");
    for root in workspace::packages().into_values().filter(is_product).flat_map(|package| package.roots) {
        facts.add(&root);
    }
    facts
});

impl Facts {
    fn add(&mut self, root: &Path) {
        let workspace = workspace::root();
        let sources = Sources::read(root, &|file| std::fs::read_to_string(workspace.join(file)).ok());
        self.graphs.push(imports::graph(&sources));
        self.fields.extend(sizes::fields(&sources));
        self.methods.extend(sizes::methods(&sources));
        self.parameters.extend(sizes::parameters(&sources));
        self.tuple_parameters.extend(sizes::tuple_parameters(&sources));
        self.clocks.extend(sizes::clocks(&sources));
        let files = sources.modules.into_values().map(|module| module.file);
        let text = |file: &Path| std::fs::read_to_string(workspace.join(file)).expect("it was parsed");
        self.lines.extend(files.map(|file| (file.clone(), lines::count(&text(&file)))));
    }
}

fn over(sized: &[Size], most: usize) -> Vec<String> {
    let over = sized.iter().filter(|sized| sized.count > most);
    over.map(|Size { place, count }| format!("{place} ({count})")).collect()
}

/// No more places than `pending` break the rule, apart from the exceptions, and each exception is needed.
fn hold(rule: &str, found: Vec<String>, pending: usize, exceptions: &Exceptions) {
    for (place, _) in exceptions {
        assert!(
            found.iter().any(|found| found.starts_with(place)),
            "{place} no longer {rule}: take it off the list"
        );
    }
    let is_excepted = |found: &String| exceptions.iter().any(|(place, _)| found.starts_with(place));
    let found: Vec<_> = found.into_iter().filter(|found| !is_excepted(found)).collect();
    assert!(
        found.len() <= pending,
        "{} places where {pending} were known; each of these {rule}:\n  {}",
        found.len(),
        found.join("\n  ")
    );
    if found.len() < pending {
        println!("{rule}: {}; lower the {pending} in the list", found.len());
    }
}
