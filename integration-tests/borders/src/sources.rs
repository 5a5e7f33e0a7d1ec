//! The production modules of one crate, parsed.
//!
//! Modules are followed from the crate's root through `mod name;`, as the compiler does. What is compiled for
//! tests alone is removed from the syntax trees, so that whatever walks them sees production code.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use syn::{Attribute, File, ImplItem, Item, Meta, TraitItem};

/// Where a module stands in its crate: `["core", "machine"]` is `crate::core::machine`; none is the root.
pub type ModulePath = Vec<String>;

/// One module.
pub struct Module {
    /// The file that holds it.
    pub file: PathBuf,
    /// What it consists of, modules in the same file included.
    pub items: Vec<Item>,
}

/// All modules of a crate, inline ones too.
#[derive(Default)]
pub struct Sources {
    /// By their paths.
    pub modules: BTreeMap<ModulePath, Module>,
}

impl Sources {
    /// Reads the crate whose root is `file`. `read` gives a file's text, if there is such a file.
    ///
    /// # Panics
    ///
    /// If a file is missing or is no Rust: the crate does not compile then.
    pub fn read(file: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Self {
        let mut sources = Self::default();
        let children = file.parent().expect("a file lies in a directory").to_path_buf();
        sources.add_file(Vec::new(), file.to_path_buf(), &children, read);
        sources
    }

    fn add_file(
        &mut self,
        path: ModulePath,
        file: PathBuf,
        children: &Path,
        read: &dyn Fn(&Path) -> Option<String>,
    ) {
        let text = read(&file).unwrap_or_else(|| panic!("{}: there is no such file", file.display()));
        let File { items, .. } =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.add(path, file, without_tests(items), children, read);
    }

    fn add(
        &mut self,
        path: ModulePath,
        file: PathBuf,
        items: Vec<Item>,
        children: &Path,
        read: &dyn Fn(&Path) -> Option<String>,
    ) {
        let (modules, items): (Vec<_>, Vec<_>) =
            items.into_iter().partition(|item| matches!(item, Item::Mod(_)));
        for module in modules {
            let Item::Mod(module) = module else { continue };
            // A file that lies in another module's folder is read there.
            if module.attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
                continue;
            }
            let name = module.ident.to_string();
            let below: ModulePath = path.iter().cloned().chain([name.clone()]).collect();
            let children = children.join(&name);
            match module.content {
                Some((_, items)) => self.add(below, file.clone(), items, &children, read),
                None => {
                    let beside = [children.with_extension("rs"), children.join("mod.rs")];
                    let file = beside.into_iter().find(|file| read(file).is_some());
                    let file = file.unwrap_or_else(|| panic!("{}: mod {name} has no file", file_of(&path)));
                    self.add_file(below, file, &children, read);
                }
            }
        }
        self.modules.insert(path, Module { file, items });
    }
}

fn file_of(path: &[String]) -> String {
    format!("crate::{}", path.join("::"))
}

/// The items that are not for tests alone.
fn without_tests(items: Vec<Item>) -> Vec<Item> {
    let kept = items.into_iter().filter(|item| !is_for_tests(attributes(item)));
    let inside = |mut item| {
        match &mut item {
            Item::Mod(module) => {
                if let Some((_, items)) = &mut module.content {
                    *items = without_tests(std::mem::take(items));
                }
            }
            Item::Impl(block) => block.items.retain(|item| match item {
                ImplItem::Fn(function) => !is_for_tests(&function.attrs),
                _ => true,
            }),
            Item::Trait(block) => block.items.retain(|item| match item {
                TraitItem::Fn(function) => !is_for_tests(&function.attrs),
                _ => true,
            }),
            _ => {}
        }
        item
    };
    kept.map(inside).collect()
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// `#[test]`, `#[cfg(test)]` and `#[cfg(all(test, ..))]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string().replace(' ', "");
            condition == "test" || condition.starts_with("all(test,")
        }
        _ => false,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A crate made of these files; its root is `src/lib.rs`.
    pub(crate) fn made_of(files: &[(&str, &str)]) -> Sources {
        let read = |path: &Path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| (*text).to_owned())
        };
        Sources::read(Path::new("src/lib.rs"), &read)
    }

    #[test]
    fn modules_are_found_beside_and_below_and_inside_their_parents() {
        let sources = made_of(&[
            ("src/lib.rs", "mod a; mod b { mod c; }"),
            ("src/a.rs", "mod d;"),
            ("src/a/d.rs", ""),
            ("src/b/c/mod.rs", "mod e;"),
            ("src/b/c/e.rs", ""),
        ]);
        let files = sources
            .modules
            .iter()
            .map(|(path, module)| (path.join("::"), module.file.to_str().expect("text")));
        let files: Vec<_> = files.collect();
        let expected = [
            ("", "src/lib.rs"),
            ("a", "src/a.rs"),
            ("a::d", "src/a/d.rs"),
            ("b", "src/lib.rs"),
            ("b::c", "src/b/c/mod.rs"),
            ("b::c::e", "src/b/c/e.rs"),
        ];
        assert_eq!(files, expected.map(|(path, file)| (path.to_owned(), file)));
    }

    #[test]
    fn what_is_for_tests_alone_is_left_out() {
        let sources = made_of(&[(
            "src/lib.rs",
            "#[cfg(test)] mod tests; #[cfg(all(test, unix))] fn a() {} #[cfg(not(test))] fn b() {} impl S { #[cfg(test)] fn c() {} }",
        )]);
        let [Item::Fn(b), Item::Impl(block)] = &sources.modules[&Vec::new()].items[..] else {
            panic!("two items are left");
        };
        assert!(b.sig.ident == "b" && block.items.is_empty());
    }
}
