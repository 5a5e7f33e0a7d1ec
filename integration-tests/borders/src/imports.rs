//! Which file uses what another file defines, and where that goes in circles.
//!
//! A file uses another one if a path in it (in a `use`, a type, an expression, a macro's arguments) leads to
//! something that the other one defines; a re-export leads on to what it names. A path that ends at a module
//! uses nothing yet: what is said through it later does. `mod child;` is a use of the child by its parent,
//! unless declarations are left out. With them, a parent and its child are a circle as soon as the child uses
//! something that the parent's own file defines, and none when all it takes from there are re-exports of
//! siblings.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
};

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Item, ItemUse, Macro, UseTree, VisRestricted,
    visit::{self, Visit},
};

use crate::sources::{Module, ModulePath, Sources};

/// What each file uses, and for what: one path as it is written there.
pub type Graph = BTreeMap<PathBuf, BTreeMap<PathBuf, String>>;

/// How a use that is only a declaration begins.
const DECLARATION: &str = "mod ";

/// Uses between the files of one crate.
pub fn graph(sources: &Sources) -> Graph {
    let names: HashMap<_, _> =
        sources.modules.iter().map(|(path, module)| (path, Names::of(module))).collect();
    let resolver = Resolver { sources, names };
    let mut graph: Graph =
        sources.modules.values().map(|module| (module.file.clone(), BTreeMap::new())).collect();
    for (path, module) in &sources.modules {
        for written in paths(module) {
            if let Some(file) = resolver.definer(path, &written) {
                add(&mut graph, &module.file, file, || written.join("::"));
            }
        }
        if let Some((name, parent)) = path.split_last() {
            add(&mut graph, &sources.modules[parent].file, &module.file, || format!("{DECLARATION}{name}"));
        }
    }
    graph
}

fn add(graph: &mut Graph, from: &Path, to: &Path, why: impl Fn() -> String) {
    let uses = graph.get_mut(from).expect("every file is a node");
    if from != to {
        uses.entry(to.to_path_buf()).or_insert_with(why);
    }
}

/// A graph without the uses that are only a parent's `mod child;`.
pub fn without_declarations(graph: &Graph) -> Graph {
    let imports = |uses: &BTreeMap<PathBuf, String>| {
        let imports = uses.iter().filter(|(_, why)| !why.starts_with(DECLARATION));
        imports.map(|(file, why)| (file.clone(), why.clone())).collect()
    };
    graph.iter().map(|(file, uses)| (file.clone(), imports(uses))).collect()
}

/// Circles among the files that lie below `folder`: sets of files each of which leads to each other. A circle
/// that leaves the folder on its way is one of a larger folder.
pub fn circles(graph: &Graph, folder: &Path) -> Vec<BTreeSet<PathBuf>> {
    let files: Vec<_> = graph.keys().filter(|file| file.starts_with(folder)).collect();
    let reach: BTreeMap<_, _> = files.iter().map(|file| (*file, reached(graph, file, folder))).collect();
    let mut circles = BTreeSet::new();
    for file in files {
        let circle: BTreeSet<_> =
            reach[file].iter().filter(|other| reach[*other].contains(file)).cloned().collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

fn reached(graph: &Graph, from: &Path, folder: &Path) -> BTreeSet<PathBuf> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from.to_path_buf()]);
    while let Some(at) = open.pop() {
        for next in graph[&at].keys().filter(|next| next.starts_with(folder)) {
            if seen.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    seen
}

/// The uses that make a circle, one a line: `a.rs -> b.rs (crate::b::Thing)`.
pub fn described(graph: &Graph, circle: &BTreeSet<PathBuf>) -> String {
    let uses = circle.iter().flat_map(|file| graph[file].iter().map(move |used| (file, used)));
    let inside = uses.filter(|(_, (used, _))| circle.contains(*used));
    let lines =
        inside.map(|(file, (used, why))| format!("    {} -> {} ({why})", file.display(), used.display()));
    lines.collect::<Vec<_>>().join("\n")
}

/// What a name of a module stands for.
enum Meaning {
    /// Something that the module itself defines.
    Own,
    /// Another name, by a `use`.
    Path(Vec<String>),
}

/// The names of one module, and the modules that all names are taken from.
struct Names {
    known: HashMap<String, Meaning>,
    globs: Vec<Vec<String>>,
}

impl Names {
    fn of(module: &Module) -> Self {
        let mut names = Self { known: HashMap::new(), globs: Vec::new() };
        let mut found = Uses::default();
        module.items.iter().for_each(|item| found.visit_item(item));
        for (path, name) in found.uses {
            match name {
                Some(name) => drop(names.known.insert(name, Meaning::Path(path))),
                None => names.globs.push(path),
            }
        }
        // What a module defines hides what it takes from elsewhere under the same name.
        names.known.extend(module.items.iter().filter_map(name).map(|name| (name, Meaning::Own)));
        names
    }
}

/// What an item is called, if it defines a name.
fn name(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

struct Resolver<'a> {
    sources: &'a Sources,
    names: HashMap<&'a ModulePath, Names>,
}

/// Where a path leads.
enum PathTarget<'a> {
    Module(&'a ModulePath),
    Item(&'a Path),
    /// In another crate.
    Elsewhere,
}

impl<'a> Resolver<'a> {
    /// The file that defines what a path in a module means; none if that is a module, or lies outside the
    /// crate.
    fn definer(&self, module: &ModulePath, path: &[String]) -> Option<&'a Path> {
        match self.resolve(module, path, &mut Vec::new())? {
            PathTarget::Item(file) => Some(file),
            PathTarget::Module(_) | PathTarget::Elsewhere => None,
        }
    }

    /// `visited` are the names on the way here: re-exports may go in circles.
    fn resolve(
        &self,
        module: &ModulePath,
        path: &[String],
        visited: &mut Vec<(ModulePath, String)>,
    ) -> Option<PathTarget<'a>> {
        let (mut at, mut rest) = (self.module(module)?, path);
        while let Some((first, others)) = rest.split_first() {
            at = match first.as_str() {
                "crate" => self.module(&[])?,
                "self" => at,
                "super" => self.module(at.split_last()?.1)?,
                _ => break,
            };
            rest = others;
        }
        while let Some((first, others)) = rest.split_first() {
            match self.step(at, first, visited) {
                Some(PathTarget::Module(next)) => (at, rest) = (next, others),
                Some(found) => return Some(found),
                // Below a module of ours, something that a macro of it defines; else another crate, or a name
                // of the function.
                None if rest.len() < path.len() => {
                    return Some(PathTarget::Item(&self.sources.modules[at].file));
                }
                None => return None,
            }
        }
        Some(PathTarget::Module(at))
    }

    /// What a name of a module stands for.
    fn step(
        &self,
        module: &'a ModulePath,
        name: &str,
        visited: &mut Vec<(ModulePath, String)>,
    ) -> Option<PathTarget<'a>> {
        let here = (module.clone(), name.to_owned());
        if visited.contains(&here) {
            return None;
        }
        visited.push(here);
        let child: ModulePath = module.iter().cloned().chain([name.to_owned()]).collect();
        let names = &self.names[module];
        let found = match (self.module(&child), names.known.get(name)) {
            (_, Some(Meaning::Own)) => Some(PathTarget::Item(&self.sources.modules[module].file)),
            (Some(child), _) => Some(PathTarget::Module(child)),
            (None, Some(Meaning::Path(path))) => {
                self.resolve(module, path, visited).or(Some(PathTarget::Elsewhere))
            }
            (None, None) => {
                names.globs.iter().find_map(|glob| match self.resolve(module, glob, visited)? {
                    PathTarget::Module(taken) => self.step(taken, name, visited),
                    // Variants of an enum.
                    PathTarget::Item(_) | PathTarget::Elsewhere => None,
                })
            }
        };
        visited.pop();
        found
    }

    fn module(&self, path: &[String]) -> Option<&'a ModulePath> {
        self.sources.modules.get_key_value(path).map(|(path, _)| path)
    }
}

/// Every path that is written in a module, as far as it could lead to another file.
fn paths(module: &Module) -> Vec<Vec<String>> {
    let mut written = PathCollector::default();
    module.items.iter().for_each(|item| written.visit_item(item));
    let mut uses = Uses::default();
    module.items.iter().for_each(|item| uses.visit_item(item));
    written.paths.into_iter().chain(uses.uses.into_iter().map(|(path, _)| path)).collect()
}

/// What `use` takes: a path, and the name it has from then on; none if it is everything there.
#[derive(Default)]
struct Uses {
    uses: Vec<(Vec<String>, Option<String>)>,
}

impl Uses {
    fn add(&mut self, before: &[String], tree: &UseTree) {
        let with = |name: &syn::Ident| before.iter().cloned().chain([name.to_string()]).collect::<Vec<_>>();
        match tree {
            UseTree::Path(path) => self.add(&with(&path.ident), &path.tree),
            UseTree::Name(name) if name.ident == "self" => {
                self.uses.push((before.to_vec(), before.last().cloned()))
            }
            UseTree::Name(name) => self.uses.push((with(&name.ident), Some(name.ident.to_string()))),
            UseTree::Rename(name) if name.ident == "self" => {
                self.uses.push((before.to_vec(), Some(name.rename.to_string())));
            }
            UseTree::Rename(name) => self.uses.push((with(&name.ident), Some(name.rename.to_string()))),
            UseTree::Glob(_) => self.uses.push((before.to_vec(), None)),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add(before, tree)),
        }
    }
}

impl<'ast> Visit<'ast> for Uses {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() {
            self.add(&[], &item.tree);
        }
    }
}

/// Paths in types, expressions, patterns and the arguments of macros.
#[derive(Default)]
struct PathCollector {
    paths: Vec<Vec<String>>,
}

impl PathCollector {
    /// Macros may mean anything; what looks like a path in their arguments is taken for one.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) if colons == 2 => path.push(ident.to_string()),
                TokenTree::Ident(ident) => {
                    self.end(&mut path);
                    path.push(ident.to_string());
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() && colons < 2 => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => {
                    self.end(&mut path);
                    self.add_tokens(group.stream());
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => self.end(&mut path),
            }
            colons = 0;
        }
        self.end(&mut path);
    }

    fn end(&mut self, path: &mut Vec<String>) {
        let path = std::mem::take(path);
        if path.len() > 1 {
            self.paths.push(path);
        }
    }
}

impl<'ast> Visit<'ast> for PathCollector {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, of: &'ast Macro) {
        self.visit_path(&of.path);
        self.add_tokens(of.tokens.clone());
    }

    fn visit_vis_restricted(&mut self, _: &'ast VisRestricted) {}

    fn visit_item_use(&mut self, _: &'ast ItemUse) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::tests::made_of;

    /// The uses of one file, without `src/`.
    fn uses(files: &[(&str, &str)], file: &str) -> Vec<String> {
        let graph = graph(&made_of(files));
        graph[Path::new(file)].keys().map(|used| used.display().to_string().replace("src/", "")).collect()
    }

    fn circles_of(files: &[(&str, &str)]) -> usize {
        circles(&graph(&made_of(files)), Path::new("src")).len()
    }

    #[test]
    fn imports_types_and_macro_arguments_are_uses() {
        let lib = ("src/lib.rs", "mod a; mod b; mod c; mod d; mod e; mod f;");
        let a = "use crate::{b::{B, self as bee}, d}; fn f(c: super::c::C) { d::run(); assert!(crate::e::E > 1); bee::g(); }";
        let files = [
            lib,
            ("src/a.rs", a),
            ("src/b.rs", "pub struct B; pub fn g() {}"),
            ("src/c.rs", "pub struct C;"),
            ("src/d.rs", "pub fn run() {}"),
            ("src/e.rs", "pub const E: u8 = 1;"),
            ("src/f.rs", ""),
        ];
        assert_eq!(uses(&files, "src/a.rs"), ["b.rs", "c.rs", "d.rs", "e.rs"]);
    }

    #[test]
    fn a_module_that_is_only_named_is_not_used() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "use crate::b; pub(in crate::b) fn f() {}"),
            ("src/b.rs", ""),
        ];
        assert_eq!(uses(&files, "src/a.rs"), Vec::<String>::new());
    }

    #[test]
    fn a_re_export_leads_to_what_it_names() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "use crate::b::Thing; use crate::b::*; fn f() { Other::new(); }"),
            ("src/b/mod.rs", "mod c; mod d; pub use c::Thing; pub use d::Other;"),
            ("src/b/c.rs", "pub struct Thing;"),
            ("src/b/d.rs", "pub struct Other;"),
        ];
        assert_eq!(uses(&files, "src/a.rs"), ["b/c.rs", "b/d.rs"]);
    }

    #[test]
    fn siblings_that_take_each_others_types_through_their_parent_are_no_circle_with_it() {
        let files = [
            ("src/lib.rs", "mod a; mod b; pub use a::A;"),
            ("src/a.rs", "pub struct A;"),
            ("src/b.rs", "use super::A; fn f(_: A) {}"),
        ];
        assert_eq!(circles_of(&files), 0);
    }

    #[test]
    fn a_child_that_takes_what_its_parent_defines_is_a_circle() {
        let files =
            [("src/lib.rs", "mod a; pub struct Own;"), ("src/a.rs", "use super::Own; fn f(_: Own) {}")];
        assert_eq!(circles_of(&files), 1);
        let imports = without_declarations(&graph(&made_of(&files)));
        assert_eq!(circles(&imports, Path::new("src")).len(), 0, "the parent itself imports nothing");
    }

    #[test]
    fn a_longer_way_round_is_a_circle_and_says_how() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c;"),
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            ("src/b.rs", "pub struct B; fn f() { crate::c::go() }"),
            ("src/c.rs", "use super::a; pub fn go() -> a::A { a::A }"),
        ];
        let graph = graph(&made_of(&files));
        let circles = circles(&graph, Path::new("src"));
        assert_eq!(circles.len(), 1);
        let lines = described(&graph, &circles[0]);
        assert_eq!(lines.lines().count(), 3, "{lines}");
        assert!(lines.contains("src/b.rs -> src/c.rs (crate::c::go)"), "{lines}");
    }

    #[test]
    fn a_circle_is_one_of_the_smallest_folder_that_holds_it() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a/mod.rs", "pub mod x; pub mod y;"),
            ("src/a/x.rs", "use crate::b::B;"),
            ("src/a/y.rs", "pub struct Y; use super::x;"),
            ("src/b.rs", "pub struct B; use crate::a::x::Z;"),
        ];
        let graph = graph(&made_of(&files));
        assert_eq!(circles(&graph, Path::new("src/a")).len(), 0);
        assert_eq!(circles(&graph, Path::new("src")).len(), 1);
    }

    #[test]
    fn names_of_other_crates_and_of_generics_lead_nowhere() {
        let files = [
            ("src/lib.rs", "mod a; pub struct T;"),
            ("src/a.rs", "use std::fmt; fn f<B: Backend>(_: B::Device, _: fmt::Error) {}"),
        ];
        assert_eq!(uses(&files, "src/a.rs"), Vec::<String>::new());
    }
}
