//! A plan as a picture: a line for each rank, time from left to right, signals as arrows.

use std::fmt::Write as _;

use super::timeline::timeline;
use super::{CheckedPlan, Operation};

/// Pixels from step to step, from rank to rank, and around all.
const STEP: usize = 34;
const LANE: usize = 64;
const LEFT: usize = 70;
const TOP: usize = 78;
/// Half of a box's side.
const HALF: usize = 12;

/// The kinds of operations: the class in the picture, what the legend says, and the letter in boxes.
const KINDS: [(&str, &str, &str); 5] = [
    ("put", "put, get, copy", "P"),
    ("reduce", "reduce", "R"),
    ("signal", "signal", "S"),
    ("wait", "wait", "W"),
    ("barrier", "barrier", "B"),
];

const STYLE: &str = "\
text { font: 11px sans-serif; fill: #24292f; } .title { font-weight: bold; font-size: 13px; }
.lane { stroke: #d0d7de; } .arrow { stroke: #6e7781; fill: none; } .head { fill: #6e7781; }
.put { fill: #54aeff; } .reduce { fill: #4ac26b; } .signal { fill: #d4a72c; } .wait { fill: #c297ff; }
.barrier { fill: #ff8182; } .letter { fill: #0d1117; text-anchor: middle; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .lane { stroke: #30363d; } .letter { fill: #0d1117; } }";

impl CheckedPlan {
    /// The plan as an SVG picture: a line for each rank, a box for each operation at the step at which it runs at the
    /// earliest, and an arrow from each signal to its wait. Pointing at a box shows the whole operation.
    pub fn draw(&self) -> String {
        let plan = self.plan();
        let events = timeline(self);
        let steps = events.iter().map(|event| event.step + 1).max().unwrap_or(1);
        let width = (LEFT + steps * STEP + HALF).max(620);
        let height = TOP + plan.world as usize * LANE;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\">\n<style>{STYLE}</style>\n<defs><marker id=\"head\" \
             viewBox=\"0 0 6 6\" refX=\"6\" refY=\"3\" markerWidth=\"6\" markerHeight=\"6\" orient=\"auto\">\
             <path class=\"head\" d=\"M0,0 L6,3 L0,6 z\"/></marker></defs>\n<text class=\"title\" x=\"8\" \
             y=\"18\">{}: {} of {} ranks</text>\n",
            escaped(&plan.name),
            escaped(plan.collective.name()),
            plan.world
        );
        for (number, (class, words, _)) in KINDS.iter().enumerate() {
            let x = 8 + number * 120;
            let _ = writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{x}\" y=\"28\" width=\"12\" height=\"12\" rx=\"2\"/><text \
                 x=\"{}\" y=\"38\">{words}</text>",
                x + 18
            );
        }
        for rank in 0..plan.world {
            let y = center(rank);
            let _ = writeln!(
                svg,
                "<text x=\"8\" y=\"{}\">rank {rank}</text><line class=\"lane\" x1=\"{LEFT}\" y1=\"{y}\" \
                 x2=\"{width}\" y2=\"{y}\"/>",
                y + 4
            );
        }
        for event in &events {
            let Some(signal) = event.signal.map(|signal| &events[signal]) else { continue };
            let down = signal.rank < event.rank;
            let edge = |rank: u32, down: bool| {
                if down { center(rank) + HALF } else { center(rank) - HALF }
            };
            let _ = writeln!(
                svg,
                "<line class=\"arrow\" marker-end=\"url(#head)\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"/>",
                middle(signal.step),
                edge(signal.rank, down),
                middle(event.step),
                edge(event.rank, !down)
            );
        }
        for event in &events {
            let instruction = &plan.programs[event.rank as usize][event.index];
            let (class, letter) = look(&instruction.operation);
            let (x, y) = (middle(event.step), center(event.rank));
            // Block groups that run at one step lie a little below each other.
            let y = y + instruction.group.map_or(0, |group| group as usize * 5);
            let line = if instruction.line == 0 {
                String::new()
            } else {
                format!(" (line {})", instruction.line)
            };
            let _ = writeln!(
                svg,
                "<g><title>{}{line}</title><rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"{}\" \
                 height=\"{}\" rx=\"3\"/><text class=\"letter\" x=\"{x}\" y=\"{}\">{letter}</text></g>",
                escaped(&instruction.operation.seen_by(event.rank)),
                x - HALF,
                y - HALF,
                2 * HALF,
                2 * HALF,
                y + 4
            );
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn middle(step: usize) -> usize {
    LEFT + HALF + step * STEP
}

fn center(rank: u32) -> usize {
    TOP + rank as usize * LANE
}

/// The class of an operation's box, and what stands in it.
fn look(operation: &Operation) -> (&'static str, &'static str) {
    let kind = match operation {
        Operation::Copy { .. } | Operation::Put { .. } | Operation::Get { .. } => KINDS[0],
        Operation::Reduce { .. } => KINDS[1],
        Operation::Signal { .. } => KINDS[2],
        Operation::Wait { .. } => KINDS[3],
        Operation::Barrier | Operation::Join => KINDS[4],
    };
    let letter = match operation {
        Operation::Get { .. } => "G",
        Operation::Copy { .. } => "C",
        _ => kind.2,
    };
    (kind.0, letter)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
