// Before first paint: the remembered choice of light or dark. No choice means what the system says.
try {
  const theme = localStorage.getItem("theme")
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme
} catch { /* storage is refused: the system decides */ }
