//! Bipartite matching: assigns places to takers such that no two takers have the same place.

/// Assigns each of `takers`, in this order, one of `places` places that fit it, as long as there is one. Returns the
/// taker of each place. As many takers as possible get a place.
pub(crate) fn assign(
    takers: impl Iterator<Item = usize>,
    places: usize,
    fits: impl Fn(usize, usize) -> bool,
) -> Vec<Option<usize>> {
    let mut assigned = vec![None; places];
    for taker in takers {
        augment(taker, &fits, &mut assigned, &mut vec![false; places]);
    }
    assigned
}

/// Assigns `taker` a place, reassigning other takers where that is needed (an augmenting path). `tried` are the places
/// that were tried for this taker already, so the recursion is no deeper than there are takers.
fn augment(
    taker: usize,
    fits: &impl Fn(usize, usize) -> bool,
    assigned: &mut [Option<usize>],
    tried: &mut [bool],
) -> bool {
    // A free place first: then no other taker has to be reassigned.
    let free = (0..assigned.len()).find(|&place| fits(taker, place) && assigned[place].is_none());
    if let Some(place) = free {
        assigned[place] = Some(taker);
        return true;
    }
    for place in 0..assigned.len() {
        if tried[place] || !fits(taker, place) {
            continue;
        }
        tried[place] = true;
        if assigned[place].is_none_or(|other| augment(other, fits, assigned, tried)) {
            assigned[place] = Some(taker);
            return true;
        }
    }
    false
}
