//! Graphs of imports: circles, and the drawings of ARCHITECTURE.md.

use std::collections::{BTreeMap, BTreeSet};

/// Imports of each file or room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ImportGraph(BTreeMap<String, BTreeSet<String>>);

impl ImportGraph {
    pub(crate) fn add(&mut self, from: &str, to: &str) {
        self.0.entry(from.to_owned()).or_default().insert(to.to_owned());
    }

    fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().flat_map(|(from, all)| all.iter().map(move |to| (from.as_str(), to.as_str())))
    }

    pub(crate) fn list(&self) -> Vec<String> {
        self.all().map(|(from, to)| format!("{from} imports {to}")).collect()
    }

    /// Nodes that are reached from a node, by one arrow or more.
    fn reached<'a>(&'a self, from: &'a str) -> BTreeSet<&'a str> {
        let (mut found, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(next) = open.pop() {
            let new = self.0.get(next).into_iter().flatten().map(String::as_str);
            open.extend(new.filter(|to| found.insert(*to)));
        }
        found
    }

    /// The nodes of a circle, if there is one.
    pub(crate) fn circle(&self) -> Option<Vec<String>> {
        let on = self.0.keys().find(|node| self.reached(node).contains(node.as_str()))?;
        let there = self.reached(on);
        let both = there.iter().filter(|node| self.reached(node).contains(on.as_str()));
        Some(both.map(|node| (*node).to_owned()).collect())
    }

    /// The arrows between rooms, of arrows between files. A room is what `room` says of a file; one of none does not count.
    pub(crate) fn rooms(&self, room: &dyn Fn(&str) -> Option<String>) -> Self {
        let mut rooms = Self::default();
        for (from, to) in self.all() {
            if let (Some(from), Some(to)) = (room(from), room(to))
                && from != to
            {
                rooms.add(&from, &to);
            }
        }
        rooms
    }

    /// The node of a drawing that stands for a room, by itself or, as `a + b`, with rooms that it is one with.
    pub(crate) fn node_of(&self, room: &str) -> String {
        let has = |node: &&str| node.split('+').any(|part| part.trim() == room);
        self.all().flat_map(|(from, to)| [from, to]).find(has).unwrap_or(room).to_owned()
    }

    /// How a drawing differs from these arrows: arrows that it lacks, also by way of others, and arrows that are none.
    pub(crate) fn differences(&self, drawing: &Self) -> Vec<String> {
        let missing = self.all().filter(|(from, to)| !drawing.reached(from).contains(to));
        let missing = missing.map(|(from, to)| format!("missing: {to} <- {from}"));
        let is_import =
            |(from, to): &(&str, &str)| self.0.get(*from).is_some_and(|all| all.contains(*to));
        let extra = drawing.all().filter(|arrow| !is_import(arrow));
        let extra = extra.map(|(from, to)| format!("extra: {to} <- {from}"));
        let circle = drawing.circle().map(|circle| format!("in a circle: {circle:?}"));
        missing.chain(extra).chain(circle).collect()
    }
}

/// The drawings of a document, by the folder that the line before each names: `<!-- arrows: FOLDER -->`. In a drawing
/// `a, b <- c` means that `c` imports both, and `a + b` that they are one room.
pub(crate) fn drawings(text: &str) -> BTreeMap<String, ImportGraph> {
    let mut found = BTreeMap::new();
    for part in text.split("<!-- arrows: ").skip(1) {
        let (folder, rest) = part.split_once(" -->").expect("the end of a comment");
        let drawing =
            rest.trim_start().strip_prefix("```\n").expect("a drawing behind the comment");
        let (drawing, _) = drawing.split_once("```").expect("the end of a drawing");
        let mut graph = ImportGraph::default();
        for line in drawing.lines() {
            let groups: Vec<Vec<&str>> =
                line.split("<-").map(|group| group.split(',').map(str::trim).collect()).collect();
            for pair in groups.windows(2) {
                for (to, from) in
                    pair[0].iter().flat_map(|to| pair[1].iter().map(move |from| (to, from)))
                {
                    graph.add(from, to);
                }
            }
        }
        found.insert(folder.to_owned(), graph);
    }
    found
}

#[test]
fn a_drawing_that_lacks_an_arrow_or_has_another_one_or_a_circle_is_found_out() {
    let mut real = ImportGraph::default();
    for (from, to) in [("b", "a"), ("c", "b"), ("c", "a")] {
        real.add(from, to);
    }
    let drawn = |text: &str| {
        let all = drawings(&format!("<!-- arrows: x -->\n```\n{text}\n```\n"));
        real.differences(&all["x"])
    };
    assert_eq!(drawn("a <- b <- c"), [""; 0]);
    assert_eq!(drawn("a <- b, c"), ["missing: b <- c"]);
    assert_eq!(drawn("a <- b <- c\nc <- d"), ["extra: c <- d"]);
    assert_eq!(drawn("a <- b <- c <- b"), ["extra: c <- b", "in a circle: [\"b\", \"c\"]"]);
}
