//! Memory as PTX promises it to threads of several devices: which stores a load may see, and in which order stores come.
//!
//! All threads agree on one order of the stores to a place. A store comes behind those that its thread has seen, and may come in
//! front of others, also if these were made earlier. A load sees any store that is not older than what its thread has seen. So
//! stores to different places arrive in any order, and late, but where a release and an acquire order them. When a kernel
//! ends its stores are performed: none comes before them any more, and the rank's next kernel sees them. A peer need not.
//!
//! One thing is left out: a load never sees a store that comes only because of what the load has found.

use std::rc::Rc;

/// Number of a place in memory: eight bytes, which are accessed whole.
pub(super) type MemoryPlace = usize;
/// Content of a place: its lower and its upper four bytes.
pub(super) type MemoryWord = (u32, u32);

/// The latest store to each place, by its number in the place's order, that a thread has seen.
type View = Vec<u8>;

fn join(view: &mut View, other: &View) {
    for (own, theirs) in view.iter_mut().zip(other) {
        *own = (*own).max(*theirs);
    }
}

#[derive(Clone)]
struct PlacedStore {
    /// Number of the word in the model's list.
    word: u8,
    /// View of whoever acquires this store.
    released: Option<Rc<View>>,
}

#[derive(Clone)]
struct StoreOrder {
    stores: Vec<PlacedStore>,
    /// The last store that is performed.
    performed: u8,
}

/// Views of a thread.
#[derive(Clone)]
struct Views {
    seen: View,
    /// View at its last fence, which its later stores release.
    fenced: View,
    /// Views that its relaxed loads would have acquired, which its next fence adds.
    unfenced: View,
}

/// The stores that threads may still see. Copies share what is equal.
#[derive(Clone)]
pub(super) struct WeakMemory {
    orders: Vec<Rc<StoreOrder>>,
    threads: Vec<Rc<Views>>,
}

/// Which stores loads see.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sight {
    /// All that they may see.
    Any,
    /// The last one of each place, which every thread sees in the end.
    Newest,
}

impl WeakMemory {
    /// Memory in which each place holds the word of that number.
    pub(super) fn new(words: &[u8], threads: usize) -> Self {
        let none = vec![0; words.len()];
        let views = Rc::new(Views { seen: none.clone(), fenced: none.clone(), unfenced: none });
        let order = |word: &u8| {
            Rc::new(StoreOrder {
                stores: vec![PlacedStore { word: *word, released: None }],
                performed: 0,
            })
        };
        Self { orders: words.iter().map(order).collect(), threads: vec![views; threads] }
    }

    /// All memories that may be after a thread has stored a word.
    pub(super) fn store(
        &self,
        thread: usize,
        place: MemoryPlace,
        word: u8,
        releases: bool,
    ) -> Vec<Self> {
        let views = &self.threads[thread];
        let seen = if releases { &views.seen } else { &views.fenced };
        let released = seen.iter().any(|nth| *nth > 0).then(|| Rc::new(seen.clone()));
        let order = &self.orders[place];
        let first = views.seen[place].max(order.performed) as usize + 1;
        let at = |nth: usize| {
            let mut next = self.clone();
            next.move_up(place, nth as u8);
            // Stores to this place that it has seen come before `nth`.
            let released = released.clone();
            Rc::make_mut(&mut next.orders[place])
                .stores
                .insert(nth, PlacedStore { word, released });
            Rc::make_mut(&mut next.threads[thread]).seen[place] = nth as u8;
            next
        };
        (first..=order.stores.len()).map(at).collect()
    }

    /// Numbers the stores of a place from `nth` on one higher.
    fn move_up(&mut self, place: MemoryPlace, nth: u8) {
        self.renumber(place, |seen| if seen >= nth { seen + 1 } else { seen });
    }

    /// Changes the number of the store to a place that is seen, in all views.
    fn renumber(&mut self, place: MemoryPlace, number: impl Fn(u8) -> u8) {
        let differs = |view: &View| number(view[place]) != view[place];
        for order in &mut self.orders {
            let is_other = |store: &PlacedStore| store.released.as_deref().is_some_and(differs);
            if order.stores.iter().any(is_other) {
                for released in Rc::make_mut(order)
                    .stores
                    .iter_mut()
                    .filter_map(|store| store.released.as_mut())
                {
                    Rc::make_mut(released)[place] = number(released[place]);
                }
            }
        }
        for views in &mut self.threads {
            if [&views.seen, &views.fenced, &views.unfenced].into_iter().any(differs) {
                let Views { seen, fenced, unfenced } = Rc::make_mut(views);
                [seen, fenced, unfenced]
                    .into_iter()
                    .for_each(|view| view[place] = number(view[place]));
            }
        }
    }

    /// All memories after a thread has loaded these places one after the other, with the words that it found.
    pub(super) fn load(
        &self,
        thread: usize,
        places: &[MemoryPlace],
        acquires: bool,
        sight: Sight,
    ) -> Vec<(Self, Vec<u8>)> {
        let mut found = vec![(self.clone(), Vec::new())];
        for &place in places {
            let each = |(memory, words): (Self, Vec<u8>)| {
                let last = memory.orders[place].stores.len() - 1;
                let first = match sight {
                    Sight::Any => memory.threads[thread].seen[place] as usize,
                    Sight::Newest => last,
                };
                let see = move |nth: usize| {
                    let (mut memory, mut words) = (memory.clone(), words.clone());
                    let store = memory.orders[place].stores[nth].clone();
                    let views = Rc::make_mut(&mut memory.threads[thread]);
                    views.seen[place] = nth as u8;
                    if let Some(released) = &store.released {
                        join(
                            if acquires { &mut views.seen } else { &mut views.unfenced },
                            released,
                        );
                    }
                    words.push(store.word);
                    (memory, words)
                };
                (first..=last).map(see).collect::<Vec<_>>()
            };
            found = found.into_iter().flat_map(each).collect();
        }
        found
    }

    /// An atomic operation on the last store to a place, which `change` makes another word of.
    pub(super) fn change(
        &mut self,
        thread: usize,
        place: MemoryPlace,
        change: impl FnOnce(u8) -> u8,
    ) {
        let stores = &mut Rc::make_mut(&mut self.orders[place]).stores;
        let last = stores.len();
        stores.push(PlacedStore { word: change(stores[last - 1].word), released: None });
        Rc::make_mut(&mut self.threads[thread]).seen[place] = last as u8;
    }

    pub(super) fn last(&self, place: MemoryPlace) -> u8 {
        self.orders[place].stores.last().expect("at least one").word
    }

    pub(super) fn fence(&mut self, thread: usize) {
        let Views { seen, fenced, unfenced } = Rc::make_mut(&mut self.threads[thread]);
        join(seen, unfenced);
        fenced.clone_from(seen);
    }

    /// Ends a kernel of these threads, and begins their next one.
    pub(super) fn end_kernel(&mut self, threads: &[usize]) {
        let mut all = Views::clone(&self.threads[threads[0]]);
        for thread in threads {
            let views = &self.threads[*thread];
            join(&mut all.seen, &views.seen);
            join(&mut all.seen, &views.unfenced);
            join(&mut all.fenced, &views.fenced);
        }
        all.unfenced.fill(0);
        for (order, seen) in self.orders.iter_mut().zip(&all.seen) {
            if order.performed < *seen {
                Rc::make_mut(order).performed = *seen;
            }
        }
        let all = Rc::new(all);
        threads.iter().for_each(|thread| self.threads[*thread] = Rc::clone(&all));
    }

    /// Lets so much time pass that every thread sees every store.
    pub(super) fn settle(&mut self) {
        let last: View = self.orders.iter().map(|order| order.stores.len() as u8 - 1).collect();
        for (order, last) in self.orders.iter_mut().zip(&last) {
            Rc::make_mut(order).performed = *last;
        }
        self.threads.iter_mut().for_each(|views| Rc::make_mut(views).seen.clone_from(&last));
    }

    /// Forgets stores that no thread can see any more, of those that will access a place at all.
    pub(super) fn forget(&mut self, accesses: impl Fn(usize, MemoryPlace) -> bool) {
        for place in 0..self.orders.len() {
            let seen = |(thread, views): (usize, &Rc<Views>)| {
                accesses(thread, place).then_some(views.seen[place])
            };
            let oldest = self.threads.iter().enumerate().filter_map(seen).min();
            let order = &self.orders[place];
            let is_over = oldest.is_none() && (order.stores.len() > 1 || order.stores[0].word != 0);
            let count = oldest.unwrap_or(order.stores.len() as u8 - 1);
            if count > 0 || is_over {
                let order = Rc::make_mut(&mut self.orders[place]);
                order.stores.drain(..count as usize);
                order.performed = order.performed.saturating_sub(count);
                if is_over {
                    order.stores[0] = PlacedStore { word: 0, released: None };
                }
                self.renumber(place, |seen| seen.saturating_sub(count));
            }
        }
    }

    /// All of it in bytes.
    pub(super) fn write(&self, to: &mut Vec<u8>) {
        for order in &self.orders {
            to.extend([order.stores.len() as u8, order.performed]);
            for store in &order.stores {
                to.push(store.word);
                to.push(store.released.is_some().into());
                to.extend(store.released.iter().flat_map(|view| view.iter()));
            }
        }
        for views in &self.threads {
            to.extend(views.seen.iter().chain(&views.fenced).chain(&views.unfenced));
        }
    }
}
