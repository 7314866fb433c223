// Search: pages of kernels hold code alone and exported files repeat it, so what explains a word comes before them, and
// before the records.
var Scorer = {
  score: ([docname, , , , score, , kind]) => {
    if (docname.startsWith("exports/")) return score - 20;
    if (docname.startsWith("measured/")) return score - 8;
    return kind === "text" && docname.startsWith("kernels/") ? score - 4 : score;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2, // Sphinx's own
};
