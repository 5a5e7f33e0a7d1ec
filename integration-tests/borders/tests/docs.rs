//! The documents, held by a machine: links resolve, lines and lengths stay within bounds, and what the
//! reference says of commands, exit codes, metrics and calls is what the sources say.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use syn::visit::{self, Visit};

/// Widest line outside code blocks, in characters.
const COLUMNS: usize = 160;
const README_WORDS: usize = 1_000;
const GPU_WORDS: usize = 1_500;
const ARCHITECTURE_WORDS: usize = 2_000;
/// Pages of decisions, their index included: one for a subject, not one for a decision.
const DECISION_PAGES: usize = 25;

/// Variables of the sources that are for tests, for building, or for the machinery of this repository alone.
const NOT_FOR_USERS: &[&str] =
    &["COX_TEST", "COX_BUILT", "COX_REPOSITORY", "COX_FAULT", "COX_VIDEO_CASES", "COX_WRITE_DOCS"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository is there")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Files below a folder with this extension, as paths from the repository's root.
fn files(folder: &str, extension: &str) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![root().join(folder)]);
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for path in entries.map(|entry| entry.expect("a readable folder").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == extension) {
                let relative = path.strip_prefix(root()).expect("below the root");
                found.push(relative.to_str().expect("a readable name").to_owned());
            }
        }
    }
    found.sort();
    found
}

fn pages() -> Vec<String> {
    let top = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"].map(str::to_owned);
    top.into_iter().chain(files("docs", "md")).collect()
}

/// Lines outside code blocks, numbered from 1.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let lines = text.lines().enumerate().filter(|(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fence && !fenced
    });
    lines.map(|(at, line)| (at + 1, line)).collect()
}

/// Targets of Markdown links and images in the prose of a page.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, line) in prose(text) {
        for rest in line.split("](").skip(1) {
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            found.push((at, target.to_owned()));
        }
    }
    found
}

/// Anchors of a page's headings, as GitHub and mdbook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).into_iter().filter_map(|(_, line)| line.strip_prefix('#'));
    let slug = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>()
    };
    headings.map(slug).collect()
}

fn assert_none(what: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{what}:\n  {}", broken.join("\n  "));
}

/// Whether a file that is there lies below a folder of the repository.
fn is_below(file: &Path, folder: &str) -> bool {
    file.canonicalize().is_ok_and(|file| file.starts_with(root().join(folder)))
}

#[test]
fn every_relative_link_leads_to_a_file_and_an_anchor() {
    let mut broken = Vec::new();
    for page in pages() {
        let text = read(&page);
        let folder = root().join(&page).parent().expect("a file has a folder").to_owned();
        for (at, link) in links(&text).into_iter().filter(|(_, link)| !link.contains("://")) {
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if path.is_empty() { root().join(&page) } else { folder.join(path) };
            if !target.exists() {
                broken.push(format!("{page}:{at}: {link}: no such file"));
            } else if page.starts_with("docs/") && !is_below(&target, "docs") {
                broken.push(format!("{page}:{at}: {link}: not in the book; name the file without a link"));
            } else if !anchor.is_empty() {
                let there = fs::read_to_string(&target).unwrap_or_default();
                if !anchors(&there).contains(anchor) {
                    broken.push(format!("{page}:{at}: {link}: no such heading"));
                }
            }
        }
    }
    assert_none("links that lead nowhere", &broken);
}

#[test]
fn the_summary_lists_every_page_of_the_book() {
    let listed: BTreeSet<_> = links(&read("docs/SUMMARY.md")).into_iter().map(|(_, link)| link).collect();
    let pages = files("docs", "md").into_iter().map(|page| page["docs/".len()..].to_owned());
    let missing: Vec<_> = pages.filter(|page| page != "SUMMARY.md" && !listed.contains(page)).collect();
    assert_none("pages that docs/SUMMARY.md does not list", &missing);
    // With mdbook's own, READMEs of the book become `index.html`, and links to them lead nowhere.
    assert!(read("docs/book.toml").contains("\nuse-default-preprocessors = false\n"));
}

#[test]
fn prose_stays_within_its_columns() {
    let mut wide = Vec::new();
    for page in pages() {
        for (at, line) in prose(&read(&page)) {
            if line.chars().count() > COLUMNS {
                wide.push(format!("{page}:{at}: {} columns", line.chars().count()));
            }
        }
    }
    assert_none("lines that are too wide", &wide);
}

#[test]
fn what_is_read_first_stays_short() {
    let words = |page: &str| read(page).split_whitespace().count();
    let bounds = [
        ("README.md", README_WORDS),
        ("docs/gpu.md", GPU_WORDS),
        ("ARCHITECTURE.md", ARCHITECTURE_WORDS),
        ("docs/develop/architecture.md", ARCHITECTURE_WORDS),
    ];
    for (page, bound) in bounds {
        assert!(words(page) <= bound, "{page} has {} words, {bound} are the most", words(page));
    }
    let decisions = files("docs/decisions", "md");
    assert!(decisions.len() <= DECISION_PAGES, "{} pages of decisions: {decisions:?}", decisions.len());
}

/// Walks through the code.
const WALKS: [&str; 3] =
    ["docs/develop/life-of-a-step.md", "docs/develop/life-of-a-fault.md", "docs/develop/life-of-a-sample.md"];
/// Most files that the main line of one opens.
const FILES_OF_A_WALK: usize = 10;
/// Most moves from one file to another on the main line of each walk, and most of these to a file that was
/// left before. They fall; the fault's are to become the others'.
const MOVES_OF_A_WALK: [[usize; 2]; 3] = [[10, 2], [22, 11], [10, 2]];
const MAIN_LINE: &str = "## The main line";

/// A row of a walk's tables.
struct Hop {
    line: usize,
    /// Under the heading of the main line.
    is_main: bool,
    file: String,
    function: String,
}

fn hops(page: &str) -> Vec<Hop> {
    let (mut hops, mut is_main) = (Vec::new(), false);
    for (line, text) in prose(&read(page)) {
        if text.starts_with("## ") {
            is_main = text == MAIN_LINE;
        }
        let cells: Vec<_> = text.split('|').map(|cell| cell.trim().trim_matches('`')).collect();
        let [_, file, function, ..] = cells[..] else { continue };
        if file.contains('/') {
            hops.push(Hop { line, is_main, file: file.to_owned(), function: function.to_owned() });
        }
    }
    hops
}

#[test]
fn functions_that_the_walks_name_exist_in_their_files() {
    let mut missing = Vec::new();
    for page in WALKS {
        let hops = hops(page);
        assert!(hops.len() > 15, "{page}: only {} hops were found: are the tables still tables?", hops.len());
        for Hop { line, file, function, .. } in hops {
            let text = fs::read_to_string(root().join(&file)).unwrap_or_default();
            let (of, name) = function.rsplit_once("::").unwrap_or(("", &function));
            let is_there = text.contains(&format!("fn {name}(")) || text.contains(&format!("fn {name}<"));
            if !is_there || !text.contains(of) {
                missing.push(format!("{page}:{line}: {file} has no function {function}"));
            }
        }
    }
    assert_none("functions that are gone", &missing);
}

/// Pages that say how to add something, with the fewest rows that their tables of files have.
const HOW_TO: [(&str, usize); 2] =
    [("docs/develop/add-a-task.md", 0), ("docs/develop/add-an-optimizer.md", 10)];

#[test]
fn files_that_a_page_says_how_to_add_to_exist_and_have_what_it_names() {
    let mut missing = Vec::new();
    for (page, least) in HOW_TO {
        let text = read(page);
        let quoted = text.split('`').skip(1).step_by(2).filter(|word| {
            let known = [".rs", ".py", ".yaml", ".md"].iter().any(|end| word.ends_with(end));
            known && word.contains('/') && !word.contains(char::is_whitespace)
        });
        missing.extend(
            quoted.filter(|file| !root().join(file).exists()).map(|file| format!("{page}: no file {file}")),
        );
        // Rows of two names; others explain a file.
        let rows: Vec<_> =
            prose(&text).into_iter().filter(|(_, line)| line.matches("` | `").count() == 1).collect();
        assert!(rows.len() >= least, "{page}: only {} rows: are the tables still tables?", rows.len());
        for (line, row) in rows {
            let cells: Vec<_> = row.split('|').map(|cell| cell.trim().trim_matches('`')).collect();
            if !read(cells[1]).contains(cells[2]) {
                missing.push(format!("{page}:{line}: {} has no {}", cells[1], cells[2]));
            }
        }
    }
    assert_none("what these pages name and is not there", &missing);
}

/// Names of AdamW's state and settings, as code has them.
const OF_ADAMW: [&str; 4] = ["exp_avg", "betas", "beta1", "beta2"];

#[test]
fn adamw_is_named_in_the_files_that_the_page_lists_and_in_no_other() {
    let page = read("docs/develop/add-an-optimizer.md");
    let folders = ["worker", "coordinator", "launcher", "proto"];
    let named = folders.into_iter().flat_map(|folder| files(folder, "rs")).filter(|file| {
        let is_test = file.contains("/tests") || file.contains("/benches/");
        !is_test && OF_ADAMW.iter().any(|name| code(&read(file)).contains(name))
    });
    let unlisted: Vec<_> = named.filter(|file| !page.contains(&format!("`{file}`"))).collect();
    assert_none("files that name AdamW's state or settings and are not in the page's list", &unlisted);
}

/// The lines of a source that are no comments.
fn code(source: &str) -> String {
    source.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_main_line_of_a_walk_opens_few_files() {
    for page in WALKS {
        let main: BTreeSet<_> =
            hops(page).into_iter().filter(|hop| hop.is_main).map(|hop| hop.file).collect();
        assert!(
            !main.is_empty() && main.len() <= FILES_OF_A_WALK,
            "{page}: its main line opens {} files, {FILES_OF_A_WALK} are the most: {main:#?}",
            main.len()
        );
    }
}

#[test]
fn the_main_line_of_a_walk_moves_on_and_seldom_comes_back() {
    for (page, [most_moves, most_returns]) in WALKS.into_iter().zip(MOVES_OF_A_WALK) {
        let main: Vec<_> = hops(page).into_iter().filter(|hop| hop.is_main).map(|hop| hop.file).collect();
        let moves: Vec<_> = (1..main.len()).filter(|&at| main[at] != main[at - 1]).collect();
        let returns = moves.iter().filter(|&&at| main[..at].contains(&main[at])).count();
        assert!(
            moves.len() <= most_moves && returns <= most_returns,
            "{page}: {} moves, {returns} returns; {most_moves} and {most_returns} are the most",
            moves.len()
        );
    }
}

#[test]
fn every_call_of_the_protocol_is_in_the_reference() {
    let page = read("docs/reference/rpcs.md");
    let protos: String = files("proto", "proto").iter().map(|file| read(file)).collect();
    let calls: Vec<_> = protos.split("  rpc ").skip(1).filter_map(|rest| rest.split('(').next()).collect();
    assert!(calls.len() > 20, "{calls:?}");
    let missing: Vec<_> =
        calls.iter().filter(|call| !page.contains(&format!("`{call}`"))).map(ToString::to_string).collect();
    assert_none("calls that docs/reference/rpcs.md does not name", &missing);
}

#[test]
fn every_exit_code_is_in_the_reference_and_no_other() {
    let source = read("launcher/src/exit.rs");
    let arms = source.lines().filter_map(|line| line.trim().strip_prefix("Self::")?.strip_suffix(','));
    let codes: BTreeSet<u8> =
        arms.filter_map(|arm| arm.split_once(" => ")).filter_map(|(_, code)| code.parse().ok()).collect();
    let page = read("docs/reference/exit-codes.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    let documented: BTreeSet<u8> = rows.filter_map(|code| code.parse().ok()).collect();
    assert!(codes.len() > 5, "{codes:?}");
    assert_eq!(codes, documented);
}

#[test]
fn every_metric_is_in_the_reference() {
    let page = read("docs/reference/metrics.md");
    let source = read("coordinator/src/service/metrics.rs");
    let mut missing = Vec::new();
    let mut found = 0;
    for call in ["gauge(", "number(", "bytes(", "seconds(", "counter(", "family(", "each("] {
        for rest in source.split(call).skip(1) {
            let Some(name) = rest.trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next())
            else {
                continue;
            };
            found += 1;
            // Behind the name may follow its unit.
            if !["`", "_"].iter().any(|end| page.contains(&format!("`coxswain_{name}{end}"))) {
                missing.push(name.to_owned());
            }
        }
    }
    assert!(found > 30, "only {found} metrics were found");
    assert_none("metrics that docs/reference/metrics.md does not name", &missing);
}

#[test]
fn every_variable_is_in_the_reference() {
    let page = read("docs/reference/environment.md");
    let mut missing = BTreeSet::new();
    for file in ["launcher/src", "worker/src", "worker/cuda/src", "coordinator/src"]
        .map(|it| files(it, "rs"))
        .concat()
    {
        for rest in read(&file).split("\"COX_").skip(1) {
            let name: String = rest.chars().take_while(|c| c.is_ascii_uppercase() || *c == '_').collect();
            let name = format!("COX_{name}");
            let internal = NOT_FOR_USERS.iter().any(|prefix| name.starts_with(prefix));
            if !internal && !page.contains(&format!("`{name}`")) {
                missing.insert(name);
            }
        }
    }
    assert_none("variables that are not in docs/reference/environment.md", &Vec::from_iter(missing));
}

/// Subcommands and long flags of the command line, as clap will spell them.
#[derive(Default)]
struct CommandLine {
    words: BTreeSet<String>,
    hidden: usize,
}

impl CommandLine {
    /// The arguments of `#[arg(...)]` or `#[command(...)]`, as text without blanks.
    fn arguments(attributes: &[syn::Attribute]) -> Option<String> {
        let ours = attributes.iter().filter(|it| it.path().is_ident("arg") || it.path().is_ident("command"));
        let text: String = ours
            .filter_map(|it| it.meta.require_list().ok())
            .map(|list| format!(",{},", list.tokens).replace(' ', ""))
            .collect();
        (!text.is_empty()).then_some(text)
    }

    fn kebab(name: &str) -> String {
        let mut out = String::new();
        for c in name.chars() {
            if c.is_uppercase() && !out.is_empty() {
                out.push('-');
            }
            out.push(if c == '_' { '-' } else { c.to_ascii_lowercase() });
        }
        out
    }
}

impl<'ast> Visit<'ast> for CommandLine {
    fn visit_field(&mut self, field: &'ast syn::Field) {
        let arguments = Self::arguments(&field.attrs).unwrap_or_default();
        if arguments.contains(",hide=true") {
            self.hidden += 1;
        } else if let Some((_, long)) = arguments.split_once(",long=\"") {
            self.words.insert(format!("--{}", long.split('"').next().unwrap_or_default()));
        } else if arguments.contains(",long,") {
            let name = field.ident.as_ref().expect("a flag has a name").to_string();
            self.words.insert(format!("--{}", Self::kebab(&name)));
        }
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        let name = item.ident.to_string();
        if name == "Command" || name.ends_with("Command") {
            let above = name.strip_suffix("Command").map(Self::kebab).unwrap_or_default();
            for variant in &item.variants {
                let word = format!("cox {above} {}", Self::kebab(&variant.ident.to_string()));
                self.words.insert(word.replace("  ", " "));
            }
        }
        visit::visit_item_enum(self, item);
    }
}

#[test]
fn every_command_and_flag_is_in_the_reference() {
    let mut found = CommandLine::default();
    for file in files("launcher/src", "rs") {
        found.visit_file(&syn::parse_file(&read(&file)).unwrap_or_else(|error| panic!("{file}: {error}")));
    }
    assert!(found.words.len() > 60, "only {} words were found", found.words.len());
    let page = read("docs/reference/commands.md").replace('\n', " ");
    let known = |word: &str| {
        page.match_indices(word).any(|(at, _)| {
            let next = page[at + word.len()..].chars().next().unwrap_or(' ');
            !next.is_alphanumeric() && next != '-'
        })
    };
    // Commands with subcommands of their own stand there with them.
    let groups = ["cox data", "cox cache", "cox model"];
    let missing: Vec<_> =
        found.words.iter().filter(|word| !groups.contains(&word.as_str()) && !known(word)).cloned().collect();
    assert_none("commands and flags that docs/reference/commands.md does not name", &missing);
}
